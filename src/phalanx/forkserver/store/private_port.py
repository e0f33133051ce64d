"""A TCP port of this host that no other user can reach, because torch's store supports only TCP."""

from __future__ import annotations

import ctypes
import errno
import itertools
import socket
import struct

_SO_ATTACH_FILTER = 26
_SO_GET_FILTER = 26
_LISTENER = "127.0.0.1"
_OWN_CLIENT = "127.0.0.2"
_TRIES = 20
_BACKLOG = 2048

# Classic BPF. The program sees a segment from its TCP header on; the first two bytes are the source port.
_LOAD_16_BITS, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x15, 0x06
_WHOLE_SEGMENT, _DROPPED = 0xFFFFFFFF, 0
_INSTRUCTION = struct.Struct("HBBI")  # code, jump if true, jump if false, operand
_PROGRAM = struct.Struct("HP")  # length, address


def source_port_filter(port: int) -> bytes:
    """Return a filter that drops segments that do not come from this port."""
    instructions = (
        (_LOAD_16_BITS, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, port),
        (_RETURN, 0, 0, _WHOLE_SEGMENT),
        (_RETURN, 0, 0, _DROPPED),
    )
    return b"".join(_INSTRUCTION.pack(*one) for one in instructions)


def source_address(number: int) -> str:
    """Return an address of the loopback network for the connection with this number; they repeat after 16 million."""
    number %= 254 << 16
    return f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


class PrivatePort:
    """A listening socket, and the only way to connect to it.

    The kernel drops all segments that do not come from one source port, before the connection exists and after. This
    object has that port bound on all addresses. SO_REUSEPORT allows further sockets on it, but only of this user.
    So that connections differ, each has another source address.

    listener     the socket for the server to listen on
    own_client   a socket that listens on the same port of another address, for a client that the server itself opens
    """

    def __init__(self) -> None:
        self._held = _reusable()
        self._held.bind(("0.0.0.0", 0))  # noqa: S104  it does not listen
        self._source = self._held.getsockname()[1]
        self.listener, self.own_client = _listeners()
        self._target = self.listener.getsockname()
        _attach(self.listener, source_port_filter(self._source))
        for listener in (self.listener, self.own_client):
            listener.listen(_BACKLOG)
        self._numbers = itertools.count()

    @property
    def own_address(self) -> tuple[str, int]:
        """The address of `own_client`."""
        return _OWN_CLIENT, self._target[1]

    def close(self) -> None:
        """Release the port."""
        for sock in (self._held, self.listener, self.own_client):
            sock.close()

    def connect(self) -> socket.socket:
        """Return a non-blocking socket, connected or connecting."""
        sock = _reusable()
        try:
            sock.bind((source_address(next(self._numbers)), self._source))
            sock.setblocking(False)
            code = sock.connect_ex(self._target)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, "cannot connect to the store")
        except OSError:
            sock.close()
            raise
        return sock


def _reusable() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def _listeners() -> tuple[socket.socket, socket.socket]:
    """Return two sockets that are bound to the same port of two addresses."""
    for _ in range(_TRIES):
        one, other = socket.socket(), socket.socket()
        try:
            one.bind((_LISTENER, 0))
            other.bind((_OWN_CLIENT, one.getsockname()[1]))
        except OSError as error:
            one.close()
            other.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return one, other
    raise OSError(errno.EADDRINUSE, "no port is free on two loopback addresses")


def _attach(sock: socket.socket, code: bytes) -> None:
    """Attach a filter. Raises OSError if the kernel rejects it, or accepts it without effect."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _PROGRAM.pack(len(code) // _INSTRUCTION.size, ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    if not sock.getsockopt(socket.SOL_SOCKET, _SO_GET_FILTER, len(code)):
        raise OSError(errno.ENOPROTOOPT, "the kernel has no socket filters")
