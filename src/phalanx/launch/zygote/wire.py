"""Messages with file descriptors over a Unix socket: a length, then JSON."""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

_HEAD = struct.Struct("!I")
_MOST_FDS = 16


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] | list[int] = ()) -> None:
    body = json.dumps(message).encode("ascii")
    data = _HEAD.pack(len(body)) + body
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None when the other side is gone."""
    head, fds = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    body, more = _exactly(sock, _HEAD.unpack(head)[0])
    if body is None:
        return None
    return json.loads(body), fds + more


def _exactly(sock: socket.socket, size: int) -> tuple[bytes | None, list[int]]:
    parts: list[bytes] = []
    fds: list[int] = []
    while size:
        try:
            data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MOST_FDS * 4), socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, ancillary = b"", []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                fds.extend(numbers)
        if not data:
            return None, fds
        parts.append(data)
        size -= len(data)
    return b"".join(parts), fds
