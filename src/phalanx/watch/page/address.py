"""The address of the page, and its link. Default: loopback."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass

from phalanx.errors import OptionError, PortError

HOST = "127.0.0.1"
PORT = 29580
_NEXT = 100  # number of further ports to try
_BACKLOG = 64
_EXAMPLE = "--page-at 127.0.0.1:29580, --page-at 29580 or --page-at 0.0.0.0"


@dataclass(frozen=True)
class PageAddress:
    """Host and port of `--page-at`."""

    host: str = HOST
    port: int | None = None  # None: PORT, or the next free one

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        address = _address(self.host)
        return self.host == "localhost" if address is None else address.is_loopback

    warning = "the page uses plain http, which others on the network can read; ssh -L needs no --page-at"

    @property
    def everywhere(self) -> bool:
        """Whether it listens on all interfaces."""
        address = _address(self.host)
        return address is not None and address.is_unspecified


def parse(text: str | None) -> PageAddress:
    """Return the address of HOST, PORT, HOST:PORT or [ADDRESS]:PORT. Raises OptionError."""
    if text is None:
        return PageAddress()
    host, port = text.strip(), ""
    if not text.isascii():
        raise _unreadable(text, "not an address")
    if host.isdigit():
        host, port = "", host
    elif host.startswith("["):
        host, _, rest = host[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise _unreadable(text, "expected a colon after the address")
        port = rest[1:]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if port and not (port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise _unreadable(text, f'"{port}" is not a port')
    if not text.strip() or any(char in host for char in "/ #?@"):
        raise _unreadable(text, "not an address")
    return PageAddress(host or HOST, int(port) if port else None)


def _unreadable(text: str, why: str) -> OptionError:
    return OptionError(f'--page-at is "{text}": {why}', details=["expected: HOST, PORT or HOST:PORT"], fix=_EXAMPLE)


def listen(at: PageAddress) -> socket.socket:
    """Return a listening socket. Raises PortError."""
    ports = (at.port,) if at.port is not None else (*range(PORT, PORT + _NEXT), 0)
    failed: OSError | None = None
    for port in ports:
        try:
            return _bound(at.host, port)
        except OSError as error:
            failed = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise _refused(at, failed) from failed


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # the name is too long
        raise socket.gaierror(socket.EAI_NONAME, "no such name") from error
    family, *_, where = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows a restart, not a second listener
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _refused(at: PageAddress, error: OSError | None) -> PortError:
    where = f"{at.host} port {at.port if at.port is not None else PORT}"
    if error is not None and error.errno == errno.EADDRINUSE:
        return PortError(
            f"the page cannot listen on {where}: the port is in use",
            details=[f"find the process: ss -ltnp 'sport = :{at.port}'"],
            fix=f"--page-at {at.host} takes the next free port",
        )
    if isinstance(error, socket.gaierror):
        return PortError(f'the page cannot listen on "{at.host}": unknown host name', fix=_EXAMPLE)
    if error is not None and error.errno == errno.EADDRNOTAVAIL:
        return PortError(
            f"the page cannot listen on {at.host}: no interface has this address",
            details=["show the addresses of this machine: ip -brief address"],
            fix=_EXAMPLE,
        )
    return PortError(f"the page cannot listen on {where}: {error}", fix=_EXAMPLE)


def link(at: PageAddress, sock: socket.socket, key: str) -> str:
    """Return the link to the page. The browser does not send the part after `#`."""
    host = os.uname().nodename if at.everywhere else at.host
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/#{key}"


def names(at: PageAddress) -> frozenset[str]:
    """Return the host names that a browser may use for the page, besides loopback addresses."""
    own = {"localhost", at.host.lower().rstrip(".")}
    return frozenset(own | {os.uname().nodename.lower(), socket.getfqdn().lower()} if at.everywhere else own)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
