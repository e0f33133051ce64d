"""Addresses of this machine and of others, as far as a worker has to know them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading


def resolve(host: str, port: int, limit: float = 3.0) -> list[str]:
    """The numeric addresses of a name. OSError: there are none, or nobody answers in `limit` seconds."""
    found: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.append(list(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except OSError as error:
            found.append(error)
        except UnicodeError:
            found.append(OSError(f"“{host}” cannot be the name of a machine"))

    # In a thread that nobody has to wait for: a dead name server takes its time.
    asking = threading.Thread(target=ask, name=f"resolve {host[:60]}", daemon=True)
    asking.start()
    asking.join(limit)
    answer = found[0] if found else OSError(f"the name service did not answer in {limit:g} s")
    if isinstance(answer, OSError):
        raise answer
    return answer


def is_loopback(address: str) -> bool:
    """Whether it is this machine's, whichever machine that is. A name never is: it may be resolved to anything."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
    return False


def is_own(address: str) -> bool:
    """Whether this machine has it: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
            return True
    except OSError:
        return False


def route_to(address: str) -> str | None:
    """The address that this machine would speak from. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def own() -> list[tuple[str, str]]:
    """(interface, address) of all that is not loopback, IPv4 first."""
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
    return next((name for name, mine in own() if mine == address), None)


def name_misleads() -> bool:
    """Whether this machine's own name stands for its loopback, or for nothing: gloo would tell others to call that."""
    try:
        addresses = resolve(socket.gethostname(), 0)
    except OSError:
        return True
    return all(is_loopback(address) for address in addresses)
