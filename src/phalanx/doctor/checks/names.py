"""Checks that this machine's name resolves to itself, and each node's name to that node."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.doctor.finding import Finding

CHECK = "names"
_PATIENCE = 10.0
_SLOW = 1.0


@dataclass(frozen=True)
class Names:
    """A name as this machine resolves it: its addresses, and their names."""

    name: str
    addresses: tuple[str, ...] = ()
    backward: tuple[tuple[str, str], ...] = ()  # pairs of address and name
    trouble: str = ""  # why the name does not resolve
    seconds: float = 0.0
    answered: bool = True  # False: the resolver timed out


def read(name: str | None = None, *, patience: float = _PATIENCE, backward: bool = True) -> Names:
    """Look up a name; default: the name of this machine. A resolver that hangs blocks only its own thread."""
    wanted = socket.gethostname() if name is None else name
    found: list[Names] = []
    thread = threading.Thread(target=lambda: found.append(_look_up(wanted, backward)), daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(patience)
    if not found:
        return Names(wanted, seconds=time.monotonic() - began, answered=False)
    return found[0]


def _look_up(name: str, backward: bool) -> Names:
    began = time.monotonic()
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Names(name, trouble=str(getattr(error, "strerror", None) or error), seconds=time.monotonic() - began)
    took = time.monotonic() - began
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
    return Names(name, addresses, _backward(addresses) if backward else (), seconds=took)


def _backward(addresses: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for address in addresses[:4]:
        with contextlib.suppress(OSError):
            found.append((address, socket.gethostbyaddr(address)[0]))
    return tuple(found)


def loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def judge(names: Names) -> list[Finding]:
    """Return findings about the name of this machine."""
    if not names.answered:
        return [
            Finding(
                CHECK,
                "yellow",
                f"this machine's name {names.name} was not resolved within {names.seconds:.0f} s",
                "the configured name server cannot be reached",
                f"correct /etc/resolv.conf, or add {names.name} with this machine's address to /etc/hosts",
            )
        ]
    if names.trouble:
        return [
            Finding(
                CHECK,
                "yellow",
                f"this machine's name {names.name} does not resolve: {names.trouble}",
                "it is neither in /etc/hosts nor known to the name server; gloo then falls back to loopback, which no "
                "other node can reach",
                f"add {names.name} with this machine's address to /etc/hosts",
            )
        ]
    found: list[Finding] = []
    if all(map(loopback, names.addresses)):
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"this machine's name {names.name} resolves to loopback ({', '.join(names.addresses)})",
                "/etc/hosts says so, as Debian sets it up; across nodes phalanx works around it, but gloo under plain "
                "torchrun would give other nodes an address that they cannot reach",
                f"give {names.name} its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME where phalanx does not",
            )
        )
    if names.seconds > _SLOW:
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"it took {names.seconds:.1f} s to look up {names.name}",
                "the first name server of /etc/resolv.conf does not answer",
                f"correct /etc/resolv.conf, or add {names.name} to /etc/hosts",
            )
        )
    if found:
        return found
    back = dict(names.backward)
    known = [f"{address} ({back.get(address, 'no name')})" for address in names.addresses]
    return [Finding(CHECK, "green", f"{names.name} resolves to {', '.join(known)}")]


@dataclass(frozen=True)
class NameLookup:
    """What `node` gets when it looks up the name of `peer`."""

    node: str
    peer: str
    names: Names


def compare(lookups: Sequence[NameLookup], addresses: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return findings about name lookups between nodes. `addresses`: the addresses of each node."""
    found = [finding for lookup in lookups for finding in _judge_lookup(lookup, addresses)]
    if lookups and not found:
        found.append(Finding(CHECK, "green", "every node finds every other by its name"))
    return found


def _judge_lookup(lookup: NameLookup, addresses: Mapping[str, Sequence[str]]) -> list[Finding]:
    names, peer = lookup.names, lookup.peer
    theirs = set(addresses.get(peer, ()))
    mine = set(addresses.get(lookup.node, ()))
    cause = "phalanx uses addresses, but a script that uses this name connects to the wrong machine"
    fix = f"name {peer} with {next(iter(addresses.get(peer, ())), 'its address')} in /etc/hosts of {lookup.node}"

    def yellow(fact: str) -> list[Finding]:
        return [Finding(CHECK, "yellow", fact, cause, fix, lookup.node)]

    if not names.answered:
        return yellow(f"the name {names.name} was not resolved within {names.seconds:.0f} s")
    if names.trouble:
        return yellow(f"the name {names.name} of {peer} does not resolve: {names.trouble}")
    if not theirs or theirs & set(names.addresses):
        others = {other for other in addresses if other != peer}
        wrong = [(address, name) for address, name in names.backward if name in others and address in theirs]
        return [
            finding
            for address, name in wrong
            for finding in yellow(f"the address {address} of {peer} resolves back to the name of another node, {name}")
        ]
    where = ", ".join(names.addresses)
    if all(map(loopback, names.addresses)) or mine & set(names.addresses):
        return yellow(f"the name {names.name} of {peer} resolves to {where}, which is {lookup.node} itself")
    return yellow(f"the name {names.name} of {peer} resolves to {where}, but {peer} has {', '.join(sorted(theirs))}")
