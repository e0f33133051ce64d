"""What a probe of the leader's port finds in network namespaces: firewalls, missing routes, wrong names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.control.member.join_problems import JoinProblem

PORT = 29500
SCRIPT = """
import asyncio, dataclasses, json, sys
from phalanx.control.member import join_problems
host, port, timeout, serve = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]

async def greet(reader, writer):
    writer.write(b"here is a phalanx-leader")
    writer.close()

async def main():
    server = await asyncio.start_server(greet, serve, port) if serve else None
    found = await join_problems.probe(host, port, timeout=timeout, hello=b"hello", expected=b"phalanx-leader")
    if server:
        server.close()
    print(json.dumps(found and dataclasses.asdict(found)))

asyncio.run(main())
"""
RULES = f"""
table inet wall {{
  chain input {{
    type filter hook input priority 0;
    tcp dport {PORT} drop
    tcp dport {PORT + 1} reject with icmp type admin-prohibited
  }}
}}
"""
HOSTS = """127.0.0.1 localhost
127.0.1.1 gpu-a
10.78.0.2 gpu-b
127.0.1.1 gpu-both
10.78.0.2 gpu-both
"""


class Network:
    """Two machines and a cable: the probes run at 10.78.0.1; 10.78.0.2 has a firewall."""

    def __init__(self) -> None:
        self.here, self.there = f"phx{os.getpid()}a", f"phx{os.getpid()}b"

    def make(self) -> None:
        for name in (self.here, self.there):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        cable = ("type", "veth", "peer", "name", "eth0", "netns", self.there)
        ip("-n", self.here, "link", "add", "eth0", *cable)
        for name, address in ((self.here, "10.78.0.1/24"), (self.there, "10.78.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        folder = Path("/etc/netns", self.here)
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(HOSTS)
        (folder / "resolv.conf").write_text("")
        ip("netns", "exec", self.there, "nft", "-f", "-", text=RULES)
        # One ARP request is enough, instead of three seconds of retries.
        self.set("ipv4/neigh/eth0/mcast_solicit", "1")
        self.set("ipv4/neigh/eth0/retrans_time_ms", "50")

    def remove(self) -> None:
        for name in (self.here, self.there):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        shutil.rmtree(f"/etc/netns/{self.here}", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")

    def set(self, name: str, value: str) -> None:
        ip("netns", "exec", self.here, "tee", f"/proc/sys/net/{name}", text=value)

    def probe(self, host: str, port: int = PORT, *, timeout: float = 10, serve: str = "") -> JoinProblem | None:
        words = [sys.executable, "-c", SCRIPT, host, str(port), str(timeout), serve]
        fields = json.loads(ip("netns", "exec", self.here, *words))
        return fields and JoinProblem(**{**fields, "details": tuple(fields["details"])})


def ip(*words: str, text: str = "") -> str:
    return subprocess.run(["ip", *words], input=text, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nft"):
        pytest.fail("network namespaces need root, iproute2 and nftables: sudo .ci/packages")
    network = Network()
    try:
        network.make()
        yield network
    finally:
        network.remove()


netns = pytest.mark.xdist_group("netns")


@netns
@pytest.mark.parametrize(
    ("host", "port", "kind", "what", "detail"),
    [
        (
            "198.51.100.7",
            PORT,
            "unreachable",
            "this machine has no route to 198.51.100.7",
            f"198.51.100.7 port {PORT}: Network is unreachable, no route from this machine",
        ),
        (
            "10.78.0.9",
            PORT,
            "unreachable",
            "this machine has no route to 10.78.0.9",
            f"10.78.0.9 port {PORT}: No route to host, tried from 10.78.0.1 (eth0)",
        ),
        (
            "gpu-b",
            PORT + 1,
            "unreachable",
            "this machine has no route to gpu-b (10.78.0.2)",
            f"10.78.0.2 port {PORT + 1}: No route to host, tried from 10.78.0.1 (eth0)",
        ),
        (
            "gpu-b",
            PORT,
            "filtered",
            f"gpu-b (10.78.0.2) does not answer on port {PORT}",
            f"10.78.0.2 port {PORT}: no answer in 0.5 s, tried from 10.78.0.1 (eth0)",
        ),
        (
            "gpu-b",
            PORT + 2,
            "refused",
            f"gpu-b (10.78.0.2) is up, but nothing listens on its port {PORT + 2}",
            f"10.78.0.2 port {PORT + 2}: the connection was refused",
        ),
    ],
)
def test_unreachable_addresses(network: Network, host: str, port: int, kind: str, what: str, detail: str) -> None:
    found = network.probe(host, port, timeout=0.5 if kind == "filtered" else 10)
    assert found is not None
    assert (found.kind, found.what, found.details) == (kind, what, (detail,))
    assert found.fix
    assert not found.certain


@netns
def test_a_name_that_resolves_to_loopback(network: Network) -> None:
    found = network.probe("gpu-a")
    assert found == JoinProblem(
        "loopback",
        'the name "gpu-a" of the leader resolves to this machine itself, and no leader runs on it',
        (
            "gpu-a is 127.0.1.1 here; no other machine is reached by that",
            "/etc/hosts:2: 127.0.1.1 gpu-a",
            f"127.0.1.1 port {PORT}, which is this machine itself: the connection was refused",
        ),
        "use an address of node 0 that other machines reach: --master ADDRESS, "
        "or give gpu-a its real address in /etc/hosts of this machine",
    )


@netns
def test_localhost_gets_no_advice_to_edit_hosts(network: Network) -> None:
    found = network.probe("localhost")
    assert found is not None
    assert (found.kind, found.fix) == (
        "loopback",
        "use an address of node 0 that other machines reach: --master ADDRESS",
    )


@netns
def test_a_given_loopback_address_is_refused(network: Network) -> None:
    found = network.probe("127.0.1.1")
    assert found is not None
    assert found.kind == "refused"


@netns
def test_a_name_that_resolves_to_loopback_on_the_host_of_the_leader(network: Network) -> None:
    assert network.probe("gpu-a", serve="127.0.1.1") is None


@netns
def test_a_name_with_two_addresses(network: Network) -> None:
    found = network.probe("gpu-both", timeout=0.5)
    assert found is not None
    assert (found.kind, len(found.details)) == ("refused", 2)
    assert any("10.78.0.2" in line and "no answer" in line for line in found.details)
    # One working address is enough: the probe does not wait for the other.
    start = time.monotonic()
    assert network.probe("gpu-both", timeout=100, serve="127.0.1.1") is None
    assert time.monotonic() - start < 50


@netns
def test_a_name_that_does_not_resolve(network: Network) -> None:
    found = network.probe("gpu-z")
    assert found is not None
    assert (found.kind, found.what) == ("unresolved", 'the name "gpu-z" of the leader does not resolve here')
    assert found.details[0].startswith("the name service says: ")
    assert found.fix == "use an address of node 0: --master ADDRESS, or add the name to /etc/hosts or DNS"


@netns
def test_a_socket_that_connects_to_itself(network: Network) -> None:
    """If nothing listens, the kernel may use the target port as the source port, and connect the socket to itself."""
    network.set("ipv4/ip_local_port_range", "40000 40000")
    try:
        found = network.probe("127.0.0.1", 40000)
    finally:
        network.set("ipv4/ip_local_port_range", "32768 60999")
    assert found is not None
    assert found.kind == "refused"
