"""Messages with file descriptors over a Unix socket: a length, then JSON."""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

_HEAD = struct.Struct("!I")
HEAD = _HEAD.size
_MAX_FDS = 16


def length(head: bytes) -> int:
    """Return the length of the body that follows this header."""
    return int(_HEAD.unpack(head)[0])


def encode(message: Message) -> bytes:
    """Return a message as bytes, with its header."""
    body = json.dumps(message).encode("ascii")
    return _HEAD.pack(len(body)) + body


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] | list[int] = ()) -> None:
    """Send a message with file descriptors."""
    data = encode(message)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors; None when the other side is gone."""
    head, fds = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    body, more = _exactly(sock, _HEAD.unpack(head)[0])
    if body is None:
        return None
    return json.loads(body), fds + more


class MessageReader:
    """Assembles messages that arrive in pieces on a non-blocking socket."""

    def __init__(self) -> None:
        self._body = b""
        self._fds: list[int] = []

    def receive(self, sock: socket.socket) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors; None when the other side is gone. Raises BlockingIOError."""
        while True:
            whole = _HEAD.size + (_HEAD.unpack(self._body[: _HEAD.size])[0] if len(self._body) >= _HEAD.size else 0)
            if len(self._body) == whole > _HEAD.size:
                break
            data, fds = _some(sock, whole - len(self._body))
            self._fds += fds
            if not data:
                return None
            self._body += data
        message, fds = json.loads(self._body[_HEAD.size :]), self._fds
        self._body, self._fds = b"", []
        return message, fds


def _exactly(sock: socket.socket, size: int) -> tuple[bytes | None, list[int]]:
    parts: list[bytes] = []
    fds: list[int] = []
    while size:
        data, more = _some(sock, size)
        fds += more
        if not data:
            return None, fds
        parts.append(data)
        size -= len(data)
    return b"".join(parts), fds


def _some(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    fds: list[int] = []
    try:
        data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        data, ancillary = b"", []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    return data, fds
