"""The gate in front of the store, with a server of the test behind it."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

import pytest

from phalanx.forkserver.store import private_port
from tests.kit.users import as_root
from tests.launcher.workers.gated_server import GatedServer, gated_server
from tests.launcher.workers.store_host import of_nobody


@pytest.fixture
def gated() -> Iterator[GatedServer]:
    with gated_server() as server:
        server.start()
        yield server


def test_connections_through_the_gate_do_not_mix(gated: GatedServer) -> None:
    with contextlib.ExitStack() as stack:
        pairs = [gated.connection() for _ in range(200)]
        for sock in itertools.chain.from_iterable(pairs):
            stack.enter_context(sock)
        for number, (client, server) in enumerate(pairs):
            client.sendall(b"%d" % number)
            assert server.recv(10) == b"%d" % number
        for number, (client, server) in enumerate(pairs):
            server.sendall(b"%d" % number)
            assert client.recv(10) == b"%d" % number


def test_an_end_that_does_not_read_stops_the_other(gated: GatedServer) -> None:
    client, server = gated.connection()
    sent, part = 0, bytes(range(256)) * 4096
    with client, server:
        client.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while sent < 1 << 28:
                sent += client.send(part[sent % 256 :])
        assert sent < 1 << 28  # buffers of the kernel and of the gate: some megabytes
        with gated.connection()[0] as another:  # the others are not blocked
            another.sendall(b"x")
        client.shutdown(socket.SHUT_WR)
        received = 0
        while data := server.recv(1 << 20):
            assert data == (bytes(range(256)) * (len(data) // 256 + 2))[received % 256 :][: len(data)]
            received += len(data)
        assert received == sent
        server.sendall(b"all of it")
        server.close()
        assert client.recv(100) == b"all of it"
        assert client.recv(100) == b""


@pytest.mark.parametrize("first", [0, 1], ids=["client", "server"])
def test_an_end_that_closes_closes_the_other(gated: GatedServer, first: int) -> None:
    ends = gated.connection()
    with ends[0], ends[1]:
        ends[first].close()
        assert ends[1 - first].recv(1) == b""


# PORT: connect to it in all ways, and print those that succeed. SOURCE: the source port that the filter lets through.
INTRUDER = """
import itertools
target, source = int(sys.argv[1]), int(sys.argv[2])
kinds = [(socket.AF_INET, host) for host in ("127.0.0.1", "0.0.0.0", "127.1.0.0", "127.9.9.9")]
kinds += [(socket.AF_INET6, host) for host in ("::", "::ffff:127.0.0.1", "::ffff:127.9.9.9")]
options = [(), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT")]
for (family, host), chosen in itertools.product(kinds, options):
    with socket.socket(family) as sock:
        for option in chosen:
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        sock.settimeout(0.5)
        try:
            sock.bind((host, source))
            sock.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", target))
            print("connected", host, chosen, flush=True)
        except OSError:
            pass
for host in ("127.0.0.1", "127.1.0.0"):
    with socket.socket() as sock:
        sock.settimeout(0.5)
        try:
            sock.bind((host, 0))
            sock.connect(("127.0.0.1", target))
            print("connected", host, flush=True)
        except OSError:
            pass
"""


@as_root
def test_another_user_cannot_connect_behind_the_gate(gated: GatedServer) -> None:
    target, source = gated.port.listener.getsockname()[1], gated.port._source
    client, server = gated.connection()  # another socket with that source port
    with client, server, of_nobody(INTRUDER, target, source) as process:
        assert process.communicate()[0] == "done\n"
        server.sendall(b"still here")
        assert client.recv(100) == b"still here"
    with contextlib.ExitStack() as stack:  # the attempts have left nothing behind
        for sock in gated.connection():
            stack.enter_context(sock)


def test_source_addresses_are_loopback_addresses_that_differ() -> None:
    numbers = (0, 1, 255, 256, 65535, 65536, (254 << 16) - 1)
    addresses = [private_port.source_address(number) for number in numbers]
    assert addresses[0] == "127.1.0.0"
    assert addresses[-1] == "127.254.255.255"
    assert len(set(addresses)) == len(addresses)
    assert private_port.source_address(254 << 16) == addresses[0]


def test_a_filter_that_the_kernel_does_not_have_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option number that the kernel accepts, and that is not a filter."""
    monkeypatch.setattr(private_port, "_SO_ATTACH_FILTER", socket.SO_RCVBUF)
    with socket.socket() as sock, pytest.raises(OSError, match="no socket filters"):
        private_port._attach(sock, private_port.source_port_filter(1))
