"""The addresses of this machine: their interfaces, which of them others can use, and routes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from phalanx.control import interfaces
from phalanx.control.interfaces import Interface

LO = Interface("lo", ("127.0.0.1", "::1"), True, True)
ETH = Interface("eth0", ("fd00::2", "192.0.2.2", "fe80::1%eth0"), True, False)
IB = Interface("ib0", ("10.1.0.2", "fe80::1%ib0", "169.254.3.4"), True, False)
DOCKER = Interface("docker0", ("172.17.0.1",), True, False)
BRIDGE = Interface("br-12ab", ("172.18.0.1", "fd01::1"), True, False)
DOWN = Interface("eth1", ("192.0.2.3",), False, False)
BARE = Interface("ib1", (), True, False)
ALL = (LO, DOCKER, BRIDGE, DOWN, ETH, IB, BARE)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("::ffff:127.0.1.1", "lo"),
        ("192.0.2.2", "eth0"),
        ("::ffff:192.0.2.2", "eth0"),
        ("FD00:0::2", "eth0"),
        ("fe80::1", "eth0"),
        ("fe80::1%ib0", "ib0"),
        ("192.0.2.3", "eth1"),
        ("192.0.2.9", None),
        ("gpu-a", None),
        ("", None),
    ],
)
def test_the_owner_of_an_address(address: str, name: str | None) -> None:
    assert interfaces.owner(address, ALL) == name


@pytest.mark.parametrize(
    ("found", "addresses"),
    [
        (ALL, ("192.0.2.2", "10.1.0.2", "fd00::2", "172.17.0.1", "172.18.0.1", "fd01::1")),
        ((LO,), ()),
        ((), ()),
        ((DOWN, BARE), ()),
        # A routed host: its address is on lo, and its cables have only link-local addresses.
        ((Interface("lo", ("127.0.0.1", "10.9.9.9"), True, True), DOCKER), ("10.9.9.9", "172.17.0.1")),
        ((ETH, Interface("eth0.5", ("192.0.2.2",), True, False)), ("192.0.2.2", "fd00::2")),
    ],
)
def test_the_addresses_for_others(found: tuple[Interface, ...], addresses: tuple[str, ...]) -> None:
    assert interfaces.reachable(found) == addresses


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:7f00:101", True),
        ("128.0.0.1", False),
        ("::ffff:192.0.2.1", False),
        ("::2", False),
        ("0.0.0.0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback_addresses(address: str, answer: bool) -> None:
    assert interfaces.is_loopback(address) is answer


def test_the_interfaces_of_this_machine() -> None:
    found = interfaces.survey()
    names = {name for _, name in socket.if_nameindex()}
    assert {interface.name for interface in found} <= names
    lo = next(interface for interface in found if interface.loopback)
    assert "127.0.0.1" in lo.addresses
    assert lo.up
    for interface in found:
        for address in interface.addresses:
            assert "%" not in address or address.startswith("fe80")
            if interface.up and "." in address:
                assert interfaces.route_to(address) == address
                assert interfaces.owner(address, found) == interface.name


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.0.1"),
        ("gpu-a", None),
        ("", None),
        ("a\0b", None),
        ("255.255.255.255", None),
    ],
)
def test_the_way_to_an_address(address: str, local: str | None) -> None:
    assert interfaces.route_to(address) == local


def test_psutil_is_not_imported_at_the_start() -> None:
    script = "import sys, phalanx.control.interfaces; sys.exit('psutil' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
