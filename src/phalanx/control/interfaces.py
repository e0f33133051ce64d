"""The addresses of this machine, and which of them other machines can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

# Interfaces of containers and virtual machines: no other machine is behind them.
VIRTUAL = ("docker", "virbr", "br-", "cni", "veth", "podman", "lxcbr", "lxdbr", "flannel", "cali")


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool


def survey() -> tuple[Interface, ...]:
    """Return all interfaces, also those without an address."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        addresses = [_spell(entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        found.append(
            Interface(
                name=name,
                addresses=tuple(addresses),
                up=state is None or state.isup,
                loopback=name == "lo" or (state is not None and "loopback" in state.flags.split(",")),
            )
        )
    return tuple(found)


def owner(address: str, interfaces: Iterable[Interface]) -> str | None:
    """Return the name of the interface that has the address. All of 127.0.0.0/8 belongs to loopback."""
    wanted = _parse(address)
    if wanted is None:
        return None
    scope = getattr(wanted, "scope_id", None)
    for interface in interfaces:
        if interface.loopback and wanted.is_loopback:
            return interface.name
        if scope is not None and scope != interface.name:
            continue
        if any(_bare(own) == _bare(address) for own in interface.addresses):
            return interface.name
    return None


def reachable(interfaces: Iterable[Interface]) -> tuple[str, ...]:
    """Return the addresses at which other machines may reach this one, most likely first."""
    found: list[tuple[tuple[bool, bool, bool], str]] = []
    for interface in interfaces:
        for address in interface.addresses if interface.up else ():
            parsed = _parse(address)
            if parsed is None or parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified:
                continue
            # A machine that announces its own routes has its address on `lo`; most have no address there.
            order = (interface.name.startswith(VIRTUAL), interface.loopback, parsed.version == 6)
            found.append((order, address))
    return tuple(dict.fromkeys(address for _, address in sorted(found, key=lambda entry: entry[0])))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address. Host names never are: they may resolve to anything."""
    parsed = _parse(address)
    return parsed is not None and parsed.is_loopback


def route_to(address: str, port: int = 9) -> str | None:
    """Return the address that this machine would send from; None if there is no route. Nothing is sent."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            return _spell(str(sock.getsockname()[0]))
    except (OSError, ValueError):
        return None


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _bare(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    return _parse(address.partition("%")[0])


def _spell(address: str) -> str:
    """Remove the scope, which only link-local addresses need."""
    parsed = _parse(address)
    return address if parsed is None or parsed.is_link_local else address.partition("%")[0]
