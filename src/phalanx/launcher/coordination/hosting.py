"""Decides whether this node leads, and where it listens: only on addresses that other machines can reach."""

from __future__ import annotations

import errno
import socket

from phalanx.control import interfaces
from phalanx.errors import PortError
from phalanx.launcher.coordination import port
from phalanx.launcher.rendezvous_config import RendezvousConfig


def open_leader_sockets(rendezvous: RendezvousConfig) -> tuple[bool, list[socket.socket]]:
    """Return whether this node leads, and the sockets on which the leader listens."""
    if rendezvous.leads is False:
        return False, []
    here = interfaces.survey()
    addresses, own = _addresses(rendezvous.location.host, here)
    if rendezvous.leads is None and not own:
        return False, []
    try:
        return True, port.listen_on(addresses, rendezvous.location.port)
    except PortError as error:
        if rendezvous.leads is None:
            return False, []  # another process of this machine leads
        if rendezvous.location.file is None:
            raise _for_all(error) from error.__cause__
        return True, port.listen_on(addresses, 0)  # the port was a guess: the leader file has the right one


def open_failover_sockets(rendezvous: RendezvousConfig) -> list[socket.socket]:
    """Return sockets for the case that this node becomes leader. Until then connections are not answered."""
    named = _resolve(rendezvous.location.host) if rendezvous.location.host is not None else []
    confined = bool(named) and all(interfaces.is_loopback(address) for address in named)
    addresses = named[:1] if confined else list(interfaces.reachable(interfaces.survey())) or ["127.0.0.1"]
    try:
        return port.listen_on(addresses, rendezvous.location.port)  # nodes that join later know this port
    except PortError:
        return port.listen_on(addresses, 0)


def _for_all(error: PortError) -> PortError:
    """Return the error with a fix for several nodes, which could not know a free port."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
        return PortError(error.what, details=error.details, fix="choose another one on every node: --master-port PORT")
    return error


def _addresses(host: str | None, here: tuple[interfaces.Interface, ...]) -> tuple[list[str], bool]:
    """Return the addresses to listen on, and whether `host`, which the others use, is this machine.

    A name that resolves to loopback here (127.0.1.1 in Debian's /etc/hosts) resolves to another address on the other
    nodes. Which one is unknown, so the leader listens on all addresses that can be reached from outside.
    """
    reachable = list(interfaces.reachable(here)) or ["127.0.0.1"]
    named = _resolve(host) if host is not None else []
    if host in named or host == "localhost":  # an address, not a name
        return named, all(interfaces.owner(address, here) is not None for address in named)
    ours = [address for address in named if interfaces.owner(address, here) is not None]
    outside = [address for address in ours if not interfaces.is_loopback(address)]
    return outside or reachable, bool(ours)


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))
