"""Checks of names, interfaces, firewalls, ports and reachability, from given facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.doctor.checks import firewall, names, network, ports, reach
from phalanx.doctor.checks.firewall import Firewall
from phalanx.doctor.checks.names import NameLookup, Names
from phalanx.doctor.checks.network import Network, NetworkInterface
from phalanx.doctor.checks.ports import Ports
from phalanx.doctor.checks.reach import Reach
from tests.doctor.checks.expected import expect


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Names("a", ("10.0.0.1",), (("10.0.0.1", "a"),)), "green", ["a resolves to 10.0.0.1 (a)"]),
        (Names("a", ("10.0.0.1",)), "green", ["no name"]),
        (Names("a", ("127.0.1.1", "10.0.0.1")), "green", []),
        (Names("a", ("127.0.1.1",)), "yellow", ["resolves to loopback (127.0.1.1)", "phalanx works around it"]),
        (Names("a", ("::1",)), "yellow", ["resolves to loopback (::1)"]),
        (Names("a", trouble="Name or service not known"), "yellow", ["does not resolve: Name or service not known"]),
        (Names("a", ("10.0.0.1",), seconds=5.0), "yellow", ["took 5.0 s"]),
        (Names("a", seconds=10.0, answered=False), "yellow", ["was not resolved within 10 s"]),
    ],
)
def test_the_name_of_the_host(facts: Names, level: str, words: list[str]) -> None:
    expect(names.judge(facts), level, *words)


@pytest.mark.parametrize(
    ("seen", "level", "words"),
    [
        (Names("b", ("10.0.0.2",), (("10.0.0.2", "b.example"),)), "green", ["every node finds"]),
        (Names("b", ("10.0.0.9",)), "yellow", ["resolves to 10.0.0.9, but b has 10.0.0.2"]),
        (Names("b", ("127.0.1.1",)), "yellow", ["which is a itself"]),
        (Names("b", ("10.0.0.1",)), "yellow", ["which is a itself"]),
        (Names("b", trouble="No such host"), "yellow", ["does not resolve: No such host"]),
        (Names("b", answered=False, seconds=10), "yellow", ["within 10 s"]),
        (Names("b", ("10.0.0.2",), (("10.0.0.2", "a"),)), "yellow", ["resolves back to the name of another node, a"]),
    ],
)
def test_the_names_of_other_nodes(seen: Names, level: str, words: list[str]) -> None:
    found = names.compare([NameLookup("a", "b", seen)], {"a": ["10.0.0.1"], "b": ["10.0.0.2"]})
    expect(found, level, *words)


LO = NetworkInterface("lo", True, 65536, ("127.0.0.1",), loopback=True)
ETH = NetworkInterface("eth0", True, 1500, ("10.0.0.1",))


@pytest.mark.parametrize(
    ("ways", "level", "words"),
    [
        ([LO, ETH], "green", ["eth0 10.0.0.1 (mtu 1500); no default route"]),
        ([LO], "yellow", ["no interface but loopback"]),
        ([LO, replace(ETH, up=False)], "yellow", ["no interface but loopback"]),
        ([LO, replace(ETH, inner=True)], "yellow", ["no interface but loopback"]),
        ([replace(LO, up=False), ETH], "red", ["loopback interface is down"]),
        ([LO, replace(ETH, addresses=("fd00::1",))], "yellow", ["IPv6 addresses only: fd00::1"]),
        ([LO, replace(ETH, mtu=576)], "yellow", ["at most 576 bytes"]),
        ([LO, replace(ETH, carrier=False)], "yellow", ["but no link"]),
    ],
)
def test_network(ways: list[NetworkInterface], level: str, words: list[str]) -> None:
    expect(network.judge(Network(tuple(ways))), level, *words)


def test_addresses_are_listed_in_the_order_of_their_use() -> None:
    ib = NetworkInterface("aaa0", True, 4096, ("10.9.0.1",))
    both = replace(ETH, addresses=("fd00::1", "10.0.0.1"))
    docker = NetworkInterface("docker0", True, 1500, ("172.17.0.1",), inner=True)
    assert Network((LO, ib, docker, both), ("eth0",)).addresses == ("10.0.0.1", "10.9.0.1", "fd00::1")


def test_default_routes_are_read_from_the_tables_of_the_kernel() -> None:
    ipv4 = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n"
    )
    zero = "0" * 32
    ipv6 = (
        f"{zero} 00 {zero} 00 fd000000000000000000000000000001 00000400 00000002 00000000 00000003     eth2\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
    )
    assert network.default_routes(ipv4, ipv6) == ("eth0", "eth2")
    assert network.default_routes("", "") == ()


def test_different_mtus_are_reported() -> None:
    jumbo = replace(ETH, mtu=9000, addresses=("10.0.0.2",))
    far = replace(ETH, mtu=9000, addresses=("10.7.0.2",))
    expect(
        network.compare({"a": Network((LO, ETH)), "b": Network((LO, jumbo))}), "yellow", "1500: a eth0; 9000: b eth0"
    )
    assert network.compare({"a": Network((LO, ETH)), "b": Network((LO, far))}) == []


NFT = """table inet filter {
	set x {
		type ipv4_addr
	}

	chain input {
		type filter hook input priority filter; policy %s;
		iif "lo" accept
		%s
	}

	chain forward {
		type filter hook forward priority filter; policy drop;
	}
}
table ip nat {
	chain post {
		type nat hook postrouting priority srcnat; policy accept;
	}
}
"""


@pytest.mark.parametrize(
    ("policy", "last", "found"),
    [
        ("accept", "tcp dport 22 accept", []),
        ("drop", "tcp dport 22 accept", ["nft inet filter input"]),
        ("accept", "reject with icmpx type admin-prohibited", ["nft inet filter input"]),
        ("accept", "counter packets 0 bytes 0 drop", ["nft inet filter input"]),
        ("accept", "ip saddr 10.0.0.9 drop", []),
    ],
)
def test_nft_chains(policy: str, last: str, found: list[str]) -> None:
    assert firewall.nft_chains(NFT % (policy, last)) == found


def test_iptables_chains() -> None:
    assert firewall.iptables_chains("-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n") == ["iptables INPUT"]
    assert firewall.iptables_chains("-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with x\n") == ["iptables INPUT"]
    assert firewall.iptables_chains("-P INPUT ACCEPT\n-A INPUT -s 10.0.0.9/32 -j DROP\n") == []
    assert firewall.iptables_chains("") == []


def test_firewall() -> None:
    expect(firewall.judge(Firewall(True, ("nft inet filter input",))), "yellow", "nft inet filter input")
    expect(firewall.judge(Firewall(True)), "green")
    expect(firewall.judge(Firewall(False)), "green", "only root can read")


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Ports(), "green", ["29500 is free; 32768 to 60999"]),
        (Ports(free=False, holder="process 7 (python, of eve)"), "yellow", ["in use by process 7 (python, of eve)"]),
        (Ports(free=False), "yellow", ["29500 is in use: "]),
        (Ports(first=40000, last=40099), "yellow", ["100 ports for connections"]),
        (Ports(first=1024, last=65535), "yellow", ["is in the range of ephemeral ports"]),
        (Ports(first=1024, last=65535, reserved=True), "green", []),
    ],
)
def test_ports(facts: Ports, level: str, words: list[str]) -> None:
    expect(ports.judge(facts), level, *words)


def test_reach() -> None:
    good = Reach("a", "b", "10.0.0.2")
    bad = Reach("a", "b", "10.0.0.2", "no answer")
    other = Reach("a", "b", "fd00::2")
    expect(reach.judge([good]), "green")
    expect(reach.judge([bad]), "red", "a: a cannot reach b (10.0.0.2: no answer)", "a firewall drops")
    expect(
        reach.judge([bad, other]), "yellow", "a reaches b at fd00::2, but not at every address (10.0.0.2: no answer)"
    )
    expect(reach.judge([other, bad]), "green")  # only the preferred address matters
    expect(reach.judge([replace(bad, trouble="Connection refused")]), "red", "10.0.0.2: Connection refused")
    assert reach.judge([]) == []
