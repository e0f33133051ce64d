"""Network addresses of this host and of others, as far as a worker needs them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading


def resolve(host: str, port: int, limit: float = 3.0) -> list[str]:
    """Return the numeric addresses of a name. Raises OSError if there are none, or no answer within `limit` seconds."""
    found: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.append(list(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except OSError as error:
            found.append(error)
        except UnicodeError:
            found.append(OSError(f"“{host}” cannot be a host name"))

    # In a thread that need not be joined: a dead name server takes long.
    asking = threading.Thread(target=ask, name=f"resolve {host[:60]}", daemon=True)
    asking.start()
    asking.join(limit)
    answer = found[0] if found else OSError(f"the name service did not answer in {limit:g} s")
    if isinstance(answer, OSError):
        raise answer
    return answer


def is_loopback(address: str) -> bool:
    """Return whether it is a loopback address. A name is not: it may resolve to anything."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
    return False


def is_own(address: str) -> bool:
    """Return whether this host has the address: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
            return True
    except OSError:
        return False


def route_to(address: str) -> str | None:
    """Return the source address for packets to an address. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def own() -> list[tuple[str, str]]:
    """Return (interface, address) of all interfaces except loopback, IPv4 first."""
    import psutil

    found = []
    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for entry in entries:
            address = str(entry.address).partition("%")[0]
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not is_loopback(address):
                found.append((name, address))
    return sorted(found, key=lambda pair: (":" in pair[1], pair[1].startswith("fe80")))


def interface_of(address: str) -> str | None:
    """Return the interface that has this address."""
    return next((name for name, mine in own() if mine == address), None)


def name_misleads() -> bool:
    """Return whether the host name resolves to loopback or to nothing: gloo would send that to other ranks."""
    try:
        addresses = resolve(socket.gethostname(), 0)
    except OSError:
        return True
    return all(is_loopback(address) for address in addresses)
