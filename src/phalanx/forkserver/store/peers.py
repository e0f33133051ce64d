"""Finds the user of the other end of a TCP connection, if that end is on this host (in this network namespace)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import NamedTuple

Address = tuple[str, int]  # host without a scope, port

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_NO_COOKIE = 0xFFFFFFFF
_ESTABLISHED = 1

_HEAD = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_PAIR = struct.Struct("!HH16s16s")  # source and destination: ports, addresses
_REST = struct.Struct("=III")  # interface, cookie
_REPLY = struct.Struct("=BBxx")  # family, state
_OWNER = struct.Struct("=12xII")  # expiry and queues; uid, inode
_TIMEOUT = 1.0  # seconds for the kernel to answer, which it does before `send` returns


def plain(host: str) -> str:
    """Return an address in the form of a client's socket: not mapped to IPv6, without a scope."""
    return host.removeprefix("::ffff:").partition("%")[0] if "." in host else host.partition("%")[0]


class PeerLookup:
    """Asks the kernel for the user of a socket, by its two addresses: through netlink, or else /proc/net."""

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
            self._netlink.settimeout(_TIMEOUT)
        self._number = 0

    def close(self) -> None:
        """Close the connection to the kernel."""
        if self._netlink is not None:
            self._netlink.close()

    def user(self, near: Address, far: Address) -> int | None:
        """Return the user of the connected socket of this host that has the address `near`, and `far` as its peer.

        None: there is no such socket here, or no process has it open any more; the kernel would then report root.
        Raises OSError for an invalid address, and if the kernel does not answer.
        """
        pair = _Pair.of(near, far)
        if self._netlink is not None:
            try:
                return self._ask(self._netlink, pair)
            except OSError:  # the kernel has no such interface, or a filter of system calls forbids it
                self._netlink.close()
                self._netlink = None
        return _search(pair)

    def works(self) -> bool:
        """Return whether the kernel reports the owner of a socket, by looking up one of this process.

        A kernel without this kind of netlink answers as if the socket did not exist. Then /proc/net is used.
        """
        if self._netlink is not None and not self._finds_own() and self._netlink is not None:
            self._netlink.close()
            self._netlink = None
        return self._finds_own()

    def _finds_own(self) -> bool:
        try:
            with (
                socket.create_server(("127.0.0.1", 0)) as listener,
                socket.create_connection(listener.getsockname()) as one,
            ):
                return self.user(one.getsockname(), listener.getsockname()) == os.getuid()
        except OSError:
            return False

    def _ask(self, netlink: socket.socket, pair: _Pair) -> int | None:
        self._number = (self._number + 1) & 0xFFFFFFFF
        content = _REQUEST.pack(pair.family, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED)
        content += pair.packed + _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
        head = _HEAD.pack(_HEAD.size + len(content), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._number, 0)
        netlink.send(head + content)
        while True:
            reply = netlink.recv(8192)
            _, kind, _, number, _ = _HEAD.unpack_from(reply)
            if number == self._number:
                return _read(kind, reply[_HEAD.size :], pair)


def _read(kind: int, content: bytes, pair: _Pair) -> int | None:
    if kind == _NLMSG_ERROR:
        code = -struct.unpack_from("=i", content)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    _, state = _REPLY.unpack_from(content)
    at = _REPLY.size + _PAIR.size
    uid, inode = _OWNER.unpack_from(content, at + _REST.size)
    # Without a connection of these addresses the kernel returns a socket that listens on the first one.
    if state != _ESTABLISHED or not inode or content[_REPLY.size : _REPLY.size + 4] != pair.packed[:4]:
        return None
    return int(uid)


class _Pair(NamedTuple):
    """The two addresses of a socket: its own, and that of its peer."""

    family: int
    near: tuple[bytes, int]
    far: tuple[bytes, int]

    @classmethod
    def of(cls, near: Address, far: Address) -> _Pair:
        hosts = [plain(address[0]) for address in (near, far)]
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        one, other = (socket.inet_pton(family, host) for host in hosts)
        return cls(family, (one, near[1]), (other, far[1]))

    @property
    def packed(self) -> bytes:
        return _PAIR.pack(self.near[1], self.far[1], self.near[0], self.far[0])


def _search(pair: _Pair) -> int | None:
    """Search the tables of all connections: slower than netlink, in proportion to the number of connections."""
    wanted = [f"{_hexadecimal(host)}:{port:04X}" for host, port in (pair.near, pair.far)]
    with open("/proc/net/tcp6" if pair.family == socket.AF_INET6 else "/proc/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[1:3] == wanted and int(fields[3], 16) == _ESTABLISHED and int(fields[9]):
                return int(fields[7])
    return None


def _hexadecimal(host: bytes) -> str:
    """Return an address as /proc/net shows it: in words of 32 bits, each in the byte order of the machine."""
    words = struct.unpack(f"={len(host) // 4}I", host)
    return "".join(f"{word:08X}" for word in words)
