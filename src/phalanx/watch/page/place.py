"""Where the page listens, and what its link looks like. Loopback, unless somebody says otherwise."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass

from phalanx.errors import OptionError, PortError

HOST = "127.0.0.1"
PORT = 29580
_NEXT = 100  # ports after that one that are tried
_BACKLOG = 64
_EXAMPLE = "--page-at 127.0.0.1:29580, --page-at 29580 or --page-at 0.0.0.0"


@dataclass(frozen=True)
class PageAddress:
    host: str = HOST
    port: int | None = None  # None: PORT, or the next that is free

    @property
    def loopback(self) -> bool:
        """Nobody but this machine gets there."""
        address = _address(self.host)
        return self.host == "localhost" if address is None else address.is_loopback

    warning = "this is plain http: whoever is on the way there can read along; ssh -L needs no --page-at"

    @property
    def everywhere(self) -> bool:
        address = _address(self.host)
        return address is not None and address.is_unspecified


def parse(text: str | None) -> PageAddress:
    """HOST, PORT, HOST:PORT or [ADDRESS]:PORT. Raises OptionError."""
    if text is None:
        return PageAddress()
    host, port = text.strip(), ""
    if not text.isascii():
        raise _unreadable(text, "that is no address")
    if host.isdigit():
        host, port = "", host
    elif host.startswith("["):
        host, _, rest = host[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise _unreadable(text, "what follows the address does not begin with a colon")
        port = rest[1:]
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if port and not (port.isdigit() and len(port) < 6 and int(port) < 1 << 16):
        raise _unreadable(text, f'"{port}" is no port')
    if not text.strip() or any(char in host for char in "/ #?@"):
        raise _unreadable(text, "that is no address")
    return PageAddress(host or HOST, int(port) if port else None)


def _unreadable(text: str, why: str) -> OptionError:
    return OptionError(f'--page-at is "{text}": {why}', details=["expected: HOST, PORT or HOST:PORT"], fix=_EXAMPLE)


def listen(place: PageAddress) -> socket.socket:
    """Raises PortError."""
    ports = (place.port,) if place.port is not None else (*range(PORT, PORT + _NEXT), 0)
    failed: OSError | None = None
    for port in ports:
        try:
            return _bound(place.host, port)
        except OSError as error:
            failed = error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise _refused(place, failed) from failed


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # too long for a name
        raise socket.gaierror(socket.EAI_NONAME, "no such name") from error
    family, *_, where = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not for a second listener: only after a first
        sock.bind(where)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _refused(place: PageAddress, error: OSError | None) -> PortError:
    where = f"{place.host} port {place.port if place.port is not None else PORT}"
    if error is not None and error.errno == errno.EADDRINUSE:
        return PortError(
            f"the page cannot listen on {where}: somebody else does",
            details=[f"who: ss -ltnp 'sport = :{place.port}'"],
            fix=f"--page-at {place.host} takes the next free one",
        )
    if isinstance(error, socket.gaierror):
        return PortError(f'the page cannot listen on "{place.host}": no such name', fix=_EXAMPLE)
    if error is not None and error.errno == errno.EADDRNOTAVAIL:
        return PortError(
            f"the page cannot listen on {place.host}: no interface of this machine has that address",
            details=["ip -brief address shows those that it has"],
            fix=_EXAMPLE,
        )
    return PortError(f"the page cannot listen on {where}: {error}", fix=_EXAMPLE)


def link(place: PageAddress, sock: socket.socket, key: str) -> str:
    """For the address bar. What follows # stays in the browser."""
    host = os.uname().nodename if place.everywhere else place.host
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/#{key}"


def names(place: PageAddress) -> frozenset[str]:
    """What a browser may call it, beside loopback's addresses."""
    own = {"localhost", place.host.lower().rstrip(".")}
    return frozenset(own | {os.uname().nodename.lower(), socket.getfqdn().lower()} if place.everywhere else own)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
