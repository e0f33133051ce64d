"""What stands between a node and its leader: real sockets, and small networks of our own where things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from phalanx.control.member import join_problems
from phalanx.control.member.join_problems import JoinProblem

HELLO = b"GET /phalanx HTTP/1.1\r\n\r\n"
EXPECTED = b"phalanx-leader"
GREETING = b"HTTP/1.1 200 OK\r\nserver: phalanx-leader\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def ask(host: str, port: int, timeout: float = 10) -> JoinProblem | None:
    return await join_problems.probe(host, port, timeout=timeout, hello=HELLO, expected=EXPECTED)


def served(handler: Handler, *, timeout: float = 10) -> tuple[JoinProblem | None, int]:
    """What a probe says to a server that does this."""

    async def meet() -> tuple[JoinProblem | None, int]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                await reader.readexactly(len(HELLO))
                await handler(reader, writer)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask("127.0.0.1", port, timeout), port

    return asyncio.run(meet())


def says(*parts: bytes) -> Handler:
    """In several packets, as far as the network lets us."""

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return handle


async def stay(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    assert await reader.read() == b""  # until the other one gives up


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# -- on this machine


@pytest.mark.parametrize("parts", [(GREETING,), (GREETING[:30], GREETING[30:]), (b"x" * 3000, GREETING)])
def test_a_leader_is_no_obstacle(parts: tuple[bytes, ...]) -> None:
    assert served(says(*parts))[0] is None


def test_a_leader_that_keeps_the_line_is_not_waited_for() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await stay(reader, writer)

    assert served(handle, timeout=100)[0] is None


def test_nothing_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # holds the port, and does not listen
        port = sock.getsockname()[1]
        found = asyncio.run(ask("127.0.0.1", port))
    assert found == JoinProblem(
        "refused",
        f"127.0.0.1 is up, but nothing listens on its port {port}",
        (f"127.0.0.1 port {port}, which is this machine itself: the connection was refused",),
        "start node 0, or give its port: --master-port PORT (is node 0 another machine? --master ADDRESS)",
    )


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.0 400 Bad Request\r\nx: y\r\n\r\n", "HTTP/1.0 400 Bad Request..x: y"),
        (b"\x15\x03\x01\0\x02\x02F", "......F"),
        (b"\x1b]0;owned\x07\x9b31m\xc3\xa9", ".]0;owned..31m.."),
        (b"a" * 60, "a" * 60),
        (b"b" * 5000 + EXPECTED, "b" * 59 + "…"),
    ],
)
def test_a_stranger_listens(answer: bytes, shown: str) -> None:
    found, port = served(says(answer))
    assert found is not None
    assert (found.kind, found.certain) == ("not-phalanx", False)
    assert found.what == f"what listens on 127.0.0.1 port {port} is not phalanx"
    assert found.details == (f'127.0.0.1 port {port}: answered "{shown}"',)


def test_a_stranger_that_speaks_and_then_waits() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail")
        await stay(reader, writer)

    found, _ = served(handle, timeout=0.3)
    assert found is not None
    assert found.kind == "not-phalanx"
    assert '"220 mail"' in found.details[0]


@pytest.mark.parametrize(
    ("handler", "end"),
    [
        (stay, "but said nothing in 0.3 s"),
        (says(), "and hung up without a word"),
        (reset, "and broke off: Connection reset by peer"),
    ],
)
def test_silence(handler: Handler, end: str) -> None:
    found, port = served(handler, timeout=0.3)
    assert found is not None
    assert (found.kind, found.certain) == ("silent", False)
    assert found.details == (f"127.0.0.1 port {port}: took the call, {end}",)


@pytest.mark.parametrize("host", ["", "a" * 64, "x\0y", "a..b"])
def test_what_cannot_be_a_name(host: str) -> None:
    found = asyncio.run(ask(host, 29500))
    assert found is not None
    assert (found.kind, found.certain) == ("unresolved", False)
    assert "\0" not in found.what
    assert "--master ADDRESS" in found.fix


def test_a_name_service_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        release.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        start = time.monotonic()
        found = asyncio.run(ask("gpu-a", 29500, 0.1))
        assert time.monotonic() - start < 10  # not even the end of the loop waits for it
    finally:
        release.set()
    assert found is not None
    assert found.kind == "unresolved"
    assert found.details == ("the name service did not answer in 0.1 s",)


def test_lines_of_a_hosts_file() -> None:
    text = (
        "127.0.0.1 localhost\n127.0.1.1\tGPU-a.lab  gpu-a # own\n"
        "#127.0.1.1 gpu-b\n192.0.2.2 gpu-b\n\n::1 gpu-a gpu-aa\n"
    )
    assert join_problems._hosts_lines("gpu-a", text) == (
        "/etc/hosts:2: 127.0.1.1 GPU-a.lab gpu-a # own",
        "/etc/hosts:6: ::1 gpu-a gpu-aa",
    )
    assert join_problems._hosts_lines("gpu-A.LAB.", text) == ("/etc/hosts:2: 127.0.1.1 GPU-a.lab gpu-a # own",)
    assert join_problems._hosts_lines("gpu-b", text) == ()
    assert join_problems._hosts_lines("own", text) == ()


@pytest.mark.parametrize(
    ("kinds", "best"),
    [
        (["unreachable", "refused"], "refused"),
        (["filtered", "unreachable"], "filtered"),
        (["refused", "not-phalanx", "silent"], "not-phalanx"),
        (["other", "unreachable"], "unreachable"),
        (["other"], "other"),
    ],
)
def test_the_address_that_led_furthest_counts(kinds: list[join_problems.Kind], best: str) -> None:
    found = [JoinProblem(kind, f"detail {kind}") for kind in kinds]
    addresses = [f"192.0.2.{number}" for number in range(len(kinds))]
    obstacle = join_problems._most_telling("gpu-a", 29500, addresses, found)
    assert obstacle.kind == best
    assert f"gpu-a (192.0.2.{kinds.index(obstacle.kind)})" in obstacle.what
    assert obstacle.details == tuple(f"detail {kind}" for kind in kinds)
    assert obstacle.fix


# -- refusals


@pytest.mark.parametrize(
    ("kind", "mine", "theirs", "words"),
    [
        ("token", "PHALANX_TOKEN (fingerprint ab12cd34)", "/home/u/token (fingerprint 99ff0011)", "--token-file FILE"),
        ("run", "train-1", "train-2", "leads another run"),
        ("plan", "world size 4", "world size 6", "the same command on every node"),
        ("version", "torch 2.13.0", "torch 2.11.0", "the same versions"),
        ("taken", "node 2", "gpu-c", "node 2 of this run is already there: gpu-c"),
        ("devices", "3 workers", "4 workers", "has 3 workers, but 4 workers were expected"),
        ("other", "this", "that", "refuses this node"),
    ],
)
def test_refusals(kind: join_problems.Kind, mine: str, theirs: str, words: str) -> None:
    found = join_problems.refusal(kind, mine=mine, theirs=theirs, leader="gpu-a:29500")
    text = "\n".join((found.what, *found.details, found.fix))
    assert (found.kind, found.certain) == (kind, True)
    for part in (mine, theirs, words, "node 0 (gpu-a:29500)"):
        assert part in text
    assert found.fix or kind == "other"


def test_a_refusal_does_nothing_to_the_terminal() -> None:
    found = join_problems.refusal("plan", mine="a", theirs="\x1b[2J\n" + "x" * 1000, leader="gpu-a")
    assert found.details[1] == f"node 0 (gpu-a): .[2J.{'x' * 194}…"


def test_a_refusal_of_a_kind_that_is_none() -> None:
    assert join_problems.refusal("silent", mine="a", theirs="b", leader="gpu-a").kind == "other"


# -- in networks of our own

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
    """Two machines and a cable: 10.78.0.1, where the probes are, and 10.78.0.2, with a firewall."""

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
        # Whether a machine is there is asked once, not for three seconds.
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
        pytest.fail("networks of our own need root, iproute2 and nftables: sudo .ci/packages")
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
            "no way leads from this machine to 198.51.100.7",
            f"198.51.100.7 port {PORT}: Network is unreachable, called in vain: no route leads there from this machine",
        ),
        (
            "10.78.0.9",
            PORT,
            "unreachable",
            "no way leads from this machine to 10.78.0.9",
            f"10.78.0.9 port {PORT}: No route to host, called from 10.78.0.1 (eth0)",
        ),
        (
            "gpu-b",
            PORT + 1,
            "unreachable",
            "no way leads from this machine to gpu-b (10.78.0.2)",
            f"10.78.0.2 port {PORT + 1}: No route to host, called from 10.78.0.1 (eth0)",
        ),
        (
            "gpu-b",
            PORT,
            "filtered",
            f"gpu-b (10.78.0.2) does not answer on port {PORT}",
            f"10.78.0.2 port {PORT}: no answer in 0.5 s, called from 10.78.0.1 (eth0)",
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
def test_ways_that_lead_nowhere(network: Network, host: str, port: int, kind: str, what: str, detail: str) -> None:
    found = network.probe(host, port, timeout=0.5 if kind == "filtered" else 10)
    assert found is not None
    assert (found.kind, found.what, found.details) == (kind, what, (detail,))
    assert found.fix
    assert not found.certain


@netns
def test_a_name_that_is_this_machine(network: Network) -> None:
    found = network.probe("gpu-a")
    assert found == JoinProblem(
        "loopback",
        'the name "gpu-a" of the leader stands for this machine itself here, and no leader is on it',
        (
            "gpu-a is 127.0.1.1 here; no other machine is reached by that",
            "/etc/hosts:2: 127.0.1.1 gpu-a",
            f"127.0.1.1 port {PORT}, which is this machine itself: the connection was refused",
        ),
        "use an address of node 0 that other machines reach: --master ADDRESS, "
        "or give gpu-a its real address in /etc/hosts of this machine",
    )


@netns
def test_localhost_is_not_to_be_changed(network: Network) -> None:
    found = network.probe("localhost")
    assert found is not None
    assert (found.kind, found.fix) == (
        "loopback",
        "use an address of node 0 that other machines reach: --master ADDRESS",
    )


@netns
def test_a_loopback_address_that_was_typed(network: Network) -> None:
    found = network.probe("127.0.1.1")
    assert found is not None
    assert found.kind == "refused"


@netns
def test_a_name_that_is_this_machine_where_the_leader_is_on_it(network: Network) -> None:
    assert network.probe("gpu-a", serve="127.0.1.1") is None


@netns
def test_a_name_with_two_addresses(network: Network) -> None:
    found = network.probe("gpu-both", timeout=0.5)
    assert found is not None
    assert (found.kind, len(found.details)) == ("refused", 2)
    assert any("10.78.0.2" in line and "no answer" in line for line in found.details)
    # One good address will do, and nobody waits for the other.
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
def test_a_call_that_reaches_the_caller(network: Network) -> None:
    """Where nobody listens, the kernel may lend the very port that is called, and connect a socket to itself."""
    network.set("ipv4/ip_local_port_range", "40000 40000")
    try:
        found = network.probe("127.0.0.1", 40000)
    finally:
        network.set("ipv4/ip_local_port_range", "32768 60999")
    assert found is not None
    assert found.kind == "refused"
