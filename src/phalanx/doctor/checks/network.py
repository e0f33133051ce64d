"""Interfaces, addresses and routes."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.doctor.finding import Finding

CHECK = "network"
_SMALLEST = 1280  # every IPv6 link supports at least this MTU
_UP = 0x1
_LOOPBACK = 0x8
_ROUTE_USABLE = 0x1
_ROUTE_REJECT = 0x200


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface."""

    name: str
    up: bool
    mtu: int
    addresses: tuple[str, ...] = ()  # without link-local addresses
    loopback: bool = False
    inner: bool = False  # a bridge or veth pair of containers: not connected to other machines
    carrier: bool = True

    @property
    def outward(self) -> bool:
        """Whether it is connected to other machines."""
        return self.up and not self.loopback and not self.inner and bool(self.addresses)


@dataclass(frozen=True)
class Network:
    """The network interfaces and default routes."""

    interfaces: tuple[NetworkInterface, ...] = ()
    default: tuple[str, ...] = ()  # interfaces of the default routes

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which other machines may reach this one, IPv4 and the default route first."""
        ways = sorted((way for way in self.interfaces if way.outward), key=lambda way: way.name not in self.default)
        found = [address for way in ways for address in way.addresses]
        return tuple(sorted(found, key=lambda address: ":" in address))


def read(root: str = "/") -> Network:
    """Read the network interfaces."""
    import psutil

    addresses: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses[name] = [
            entry.address
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not _link_local(entry.address)
        ]
    found = []
    for path in sorted(Path(root, "sys/class/net").glob("*")):
        flags = int(_text(path / "flags") or "0", 16)
        if not (path / "flags").exists():
            continue  # not an interface: the kernel also keeps files of its bonding driver here
        found.append(
            NetworkInterface(
                name=path.name,
                up=bool(flags & _UP),
                mtu=int(_text(path / "mtu") or "0"),
                addresses=tuple(addresses.get(path.name, ())),
                loopback=bool(flags & _LOOPBACK),
                inner=_inner(path),
                carrier=_text(path / "carrier") != "0",
            )
        )
    ipv4 = _text(Path(root, "proc/net/route"))
    ipv6 = _text(Path(root, "proc/net/ipv6_route"))
    return Network(tuple(found), default_routes(ipv4, ipv6))


def default_routes(ipv4: str, ipv6: str) -> tuple[str, ...]:
    """Return the interfaces of the default routes, from both tables of the kernel."""
    found = []
    for line in ipv4.splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == "00000000" and int(words[3], 16) & _ROUTE_USABLE:
            found.append(words[0])
    for line in ipv6.splitlines():
        words = line.split()
        if len(words) == 10 and words[0] == "0" * 32 and words[1] == "00":
            flags = int(words[8], 16)
            if flags & _ROUTE_USABLE and not flags & _ROUTE_REJECT:
                found.append(words[9])
    return tuple(dict.fromkeys(found))


def _inner(path: Path) -> bool:
    if path.name.startswith(("docker", "virbr", "cni", "flannel", "cali", "lxc", "podman", "br-")):
        return True
    # One end of a veth pair whose other end is in a child namespace. A container's own eth0 is also a veth, but is
    # named like a network card.
    return path.name.startswith("veth")


def _link_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_link_local
    except ValueError:
        return True


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return ""


def judge(network: Network) -> list[Finding]:
    """Return findings about the network."""
    found: list[Finding] = []
    loop = [way for way in network.interfaces if way.loopback]
    if not any(way.up for way in loop):
        found.append(
            Finding(
                CHECK,
                "red",
                "the loopback interface is down",
                "processes of this machine talk to each other through it",
                "ip link set lo up",
            )
        )
    outward = [way for way in network.interfaces if way.outward]
    if not outward:
        found.append(
            Finding(
                CHECK,
                "yellow",
                "no interface but loopback is up and has an address",
                "this machine can run by itself, but no other can reach it",
                "ip address; ip link set NAME up",
            )
        )
    elif not any("." in address for way in outward for address in way.addresses):
        found.append(
            Finding(
                CHECK,
                "yellow",
                f"there are IPv6 addresses only: {', '.join(network.addresses)}",
                "NCCL looks for IPv4 first",
                "NCCL_SOCKET_FAMILY=AF_INET6 phalanx run …",
            )
        )
    for way in outward:
        if way.mtu < _SMALLEST:
            found.append(
                Finding(
                    CHECK,
                    "yellow",
                    f"{way.name} carries packets of at most {way.mtu} bytes",
                    "less than any link must carry; large messages are slow or lost",
                    f"ip link set {way.name} mtu 1500",
                )
            )
        if not way.carrier:
            found.append(
                Finding(
                    CHECK,
                    "yellow",
                    f"{way.name} has addresses ({', '.join(way.addresses)}), but no link",
                    "a cable is unplugged, or a port of the switch is down",
                    f"plug it in, or ip link set {way.name} down",
                )
            )
    if not found:
        route = f"default route over {', '.join(network.default)}" if network.default else "no default route"
        ways = [f"{way.name} {', '.join(way.addresses)} (mtu {way.mtu})" for way in outward]
        found.append(Finding(CHECK, "green", f"{'; '.join(ways)}; {route}"))
    return found


def compare(networks: Mapping[str, Network]) -> list[Finding]:
    """Return findings about MTUs that differ within a network: packets that are too large are lost silently."""
    sizes: dict[str, dict[int, list[str]]] = {}
    for node, network in networks.items():
        for way in network.interfaces:
            if way.outward:
                for address in way.addresses:
                    sizes.setdefault(_neighbourhood(address), {}).setdefault(way.mtu, []).append(f"{node} {way.name}")
    found = []
    for neighbourhood, by_size in sizes.items():
        if len(by_size) > 1:
            listed = "; ".join(f"{mtu}: {', '.join(sorted(who))}" for mtu, who in sorted(by_size.items()))
            found.append(
                Finding(
                    CHECK,
                    "yellow",
                    f"nodes of the network {neighbourhood} send packets of different sizes ({listed})",
                    "large packets may be lost in silence: small messages pass and large ones hang",
                    f"ip link set NAME mtu {min(by_size)}   (on all of them)",
                )
            )
    return found


def _neighbourhood(address: str) -> str:
    """Guess the network of an address; the netmask is not known here."""
    return str(ipaddress.ip_network(f"{address.partition('%')[0]}/{64 if ':' in address else 24}", strict=False))


def machine_id(root: str = "/") -> str:
    """Return an id that is the same for all processes that share a kernel and a network."""
    boot = _text(Path(root, "proc/sys/kernel/random/boot_id"))
    try:
        return f"{boot} {os.stat(Path(root, 'proc/self/ns/net')).st_ino}"
    except OSError:
        return f"{boot} {socket.gethostname()}"
