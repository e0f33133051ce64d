"""Messages with file descriptors over a Unix stream socket: a length, then JSON. A reply has the `id` of its request.

Standard library only, not contract/encoding.py: the fork server and the probe run in the script's interpreter, where
msgspec may not be installed, and where an import would show up in the script. Both ends are processes of one run.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

LIMIT = 1 << 30  # bytes of a message: evidence about thousands of ranks has tens of megabytes
_HEAD = struct.Struct("!I")
_CHUNK = 1 << 20  # bytes that are allocated before they have arrived
_MAX_FDS = 16


def encode(message: Message) -> bytes:
    """Return a message as bytes, with its header."""
    return frame(json.dumps(message).encode("ascii"))


def frame(body: bytes) -> bytes:
    """Return an encoded message with its header."""
    return _HEAD.pack(len(body)) + body


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] | list[int] = ()) -> None:
    """Send a message with file descriptors."""
    send_frame(sock, json.dumps(message).encode("ascii"), fds)


def send_frame(sock: socket.socket, body: bytes, fds: tuple[int, ...] | list[int] = ()) -> None:
    """Send an encoded message with file descriptors."""
    data = frame(body)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket, limit: int = LIMIT) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors; None when the other side has ended. Raises ValueError."""
    return MessageReader(limit).receive(sock)


class FrameReader:
    """Assembles encoded messages that arrive in pieces, and never reads beyond the end of one."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._data = bytearray()
        self._fds: list[int] = []

    @property
    def missing(self) -> int:
        """Return the maximum number of bytes to read next. Raises ValueError if the message is longer than the
        limit.
        """
        if len(self._data) < _HEAD.size:
            return _HEAD.size - len(self._data)
        size = int(_HEAD.unpack_from(self._data)[0])
        if not 0 < size <= self._limit:
            raise ValueError(f"a message of {size} bytes")
        return min(_HEAD.size + size - len(self._data), _CHUNK)

    def feed_frame(self, data: bytes) -> bytes | None:
        """Add at most `missing` bytes. Return the encoded message once it is complete. Raises ValueError."""
        self._data += data
        if self.missing:
            return None
        body, self._data = bytes(self._data[_HEAD.size :]), bytearray()
        return body

    def receive_frame(self, sock: socket.socket) -> tuple[bytes, list[int]] | None:
        """Return the next encoded message and its descriptors; None when the other side has ended.

        Raises ValueError, and BlockingIOError if the socket is non-blocking: call again when there is more to read.
        """
        while True:
            data, fds = _some(sock, self.missing)
            self._fds += fds
            if not data:
                return None
            body = self.feed_frame(data)
            if body is not None:
                fds, self._fds = self._fds, []
                return body, fds


class MessageReader(FrameReader):
    """Assembles messages, and decodes them."""

    def feed(self, data: bytes) -> Message | None:
        """Add at most `missing` bytes. Return the message once it is complete. Raises ValueError."""
        body = self.feed_frame(data)
        return None if body is None else _decode(body)

    def receive(self, sock: socket.socket) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors; None when the other side has ended. Raises as
        `receive_frame`.
        """
        received = self.receive_frame(sock)
        return None if received is None else (_decode(received[0]), received[1])


def _decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(message, dict):
        raise ValueError("a message that is not an object")
    return message


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
