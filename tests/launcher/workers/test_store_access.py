"""Which processes reach the store of a run."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.forkserver import signed_store
from phalanx.forkserver.store import access, peers
from phalanx.forkserver.store.peers import PeerLookup
from phalanx.launcher.workers import store_process
from tests.kit.users import as_root
from tests.launcher.workers import store_host
from tests.launcher.workers.gated_server import gated_server
from tests.launcher.workers.store_host import COUNT, DELETE, HELLO, PING, answered, of_nobody


@contextlib.contextmanager
def connection(listening: str, calling: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return a connection to this host: the calling socket, and the other."""
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    with (
        socket.create_server((listening, 0), family=family, dualstack_ipv6=listening == "::") as listener,
        socket.create_connection((calling, listener.getsockname()[1])) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


@pytest.fixture(params=["netlink", "/proc"])
def lookup(request: pytest.FixtureRequest) -> Iterator[PeerLookup]:
    lookup = PeerLookup()
    if request.param == "/proc":
        lookup.close()
        lookup._netlink = None
    yield lookup
    lookup.close()


@pytest.mark.parametrize(("listening", "calling"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_the_user_of_a_connection_is_found(lookup: PeerLookup, listening: str, calling: str) -> None:
    with connection(listening, calling) as (one, other):
        peer, own = other.getpeername()[:2], other.getsockname()[:2]
        assert lookup.user(peer, own) == os.getuid()
        assert lookup.user((peer[0], own[1]), own) is None  # a listening socket does not count
        one.close()
        # not root, which the kernel reports for a socket that no process has open
        assert lookup.user(peer, own) is None
    assert lookup.user(("192.0.2.1", 4711), ("192.0.2.2", 4712)) is None
    assert lookup.works()


def test_netlink_is_used_where_there_is_any() -> None:
    lookup = PeerLookup()
    with connection("127.0.0.1", "127.0.0.1") as (_, other):
        lookup.user(other.getpeername(), other.getsockname())
    assert lookup._netlink is not None
    lookup.close()


def test_addresses_as_proc_shows_them() -> None:
    assert peers._hexadecimal(socket.inet_aton("127.0.0.1")) in ("0100007F", "7F000001")
    assert peers.plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert peers.plain("fe80::1%eth0") == "fe80::1"


def test_proc_is_used_where_the_kernel_has_no_such_netlink() -> None:
    """It answers ENOENT, as for a socket that does not exist."""
    lookup = PeerLookup()
    lookup._ask = lambda _netlink, _pair: None  # type: ignore[method-assign,assignment]
    assert lookup.works()
    assert lookup._netlink is None


ASK = """
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
try:
    sock.sendall(bytes.fromhex(sys.argv[3]))
    print(sock.recv(64).hex(), flush=True)
except ConnectionError:
    print("", flush=True)
"""
NOTHING = "\ndone\n"


@as_root
def test_another_user_is_refused_and_named_once() -> None:
    with gated_server() as gated:
        gated.start()
        for _ in range(3):
            with of_nobody(ASK, *gated.address, PING.hex()) as process:
                assert process.communicate()[0] == NOTHING
        client, server = gated.connection()  # the first that was admitted
        with client, server:
            client.sendall(b"first")
            assert server.recv(64) == b"first"
        assert gated.message() == {"is": "refused", "who": "user nobody"}
        gated.agent.setblocking(False)
        with pytest.raises(BlockingIOError):
            gated.message()


def test_a_process_that_only_tries_the_port_is_not_named() -> None:
    with gated_server() as gated:
        for sent in (b"", b"ping"):
            with gated.call() as client:
                client.sendall(sent)
        gated.start()
        for end in gated.connection():
            end.close()
        gated.agent.setblocking(False)
        with pytest.raises(BlockingIOError):
            gated.message()


@as_root
def test_what_another_user_sends_before_it_hangs_up_is_not_passed_on() -> None:
    """The kernel reports root as the owner of a socket that no process has open any more."""
    send = """
for _ in range(50):
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
        sock.send(b"nobody")
"""
    with gated_server() as gated:
        with of_nobody(send, *gated.address) as process:
            assert process.communicate()[0] == "done\n"
        with gated.call() as client:
            client.sendall(b"first")
            gated.start()
            with gated.accept() as server:
                assert server.recv(64) == b"first"


@as_root
def test_thousands_of_connections_of_another_user_do_not_stop_the_ranks() -> None:
    connect = """
held = []
for _ in range(3000):
    held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60))
    if len(held) > 500:
        held.pop(0).close()
"""
    with gated_server() as gated:
        gated.start()
        client, server = gated.connection()
        with client, server, of_nobody(connect, *gated.address) as process:
            for _ in range(200):
                client.sendall(b"x")
                assert server.recv(1) == b"x"
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            for end in gated.connection():
                end.close()


@as_root
@pytest.mark.parametrize("admitted", [True, False])
def test_on_several_nodes_the_agent_decides_about_the_others(admitted: bool) -> None:
    with gated_server(remote=True) as gated:
        gated.start()
        for end in gated.connection():  # of this user: the agent is not asked
            end.close()
        with of_nobody(ASK, *gated.address, b"ping".hex()) as process:
            asked = gated.message()
            assert asked["is"] == "ask"
            assert asked["far"] == list(gated.address)
            assert asked["near"][0] == "127.0.0.1"
            gated.answer(number=asked["number"], admitted=admitted)
            if admitted:
                with gated.accept() as server:
                    assert server.recv(64) == b"ping"
                    server.sendall(b"pong")
            assert process.communicate()[0] == f"{b'pong'.hex() if admitted else ''}\ndone\n"
        if not admitted:
            assert gated.message() == {"is": "refused", "who": "user nobody"}


@as_root
def test_a_connection_about_which_the_agent_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_DEADLINE", 0.0)
    with gated_server(remote=True) as gated:
        gated.start()
        with of_nobody(ASK, *gated.address, b"one".hex()) as one, of_nobody(ASK, *gated.address, b"two".hex()) as two:
            numbers = [gated.message()["number"], gated.message()["number"]]
            gated.answer(number=numbers[0], admitted=True)  # too late
            gated.answer(number=numbers[1], admitted=True)
            with gated.accept() as server:
                assert server.recv(64) in (b"one", b"two")
                server.sendall(b"!")
            answers = sorted([one.communicate()[0], two.communicate()[0]])
        assert answers == [NOTHING, f"{b'!'.hex()}\ndone\n"]


@as_root
@pytest.mark.extended
def test_another_user_reaches_torchs_store_by_none_of_its_ports() -> None:
    with store_host.hosted() as hosted:
        hosted.wait_for("heartbeat")
        client = hosted.client()
        client.set("secret", "value")
        ports = hosted.listens_on()
        assert ("127.0.0.1", hosted.port) in ports
        assert len(ports) == 3  # for the ranks, for torch's server, and for the client in the store's own process
        for query in (COUNT, DELETE + (7).to_bytes(8, sys.byteorder) + b"/secret"):
            for port in ports:
                with of_nobody(ASK.replace("60", "2"), *port, (HELLO + query).hex()) as process:
                    out, _ = process.communicate()
                assert out in (NOTHING, ""), port  # closed, or no connection at all
        assert client.get("secret") == b"value"
        with hosted.connect() as sock:
            assert answered(sock, HELLO + COUNT, 8) == struct.pack("=q", 1)
            hosted.agent.close()
            assert sock.recv(1) == b""  # the store ends with its agent


@pytest.mark.extended
def test_if_the_kernel_does_not_report_users_the_agent_is_informed() -> None:
    before = (
        "import socket; plain = socket.socket\n"
        "class Refused(plain):\n"
        "    def __init__(self, family=-1, *rest, **named):\n"
        "        if family == socket.AF_NETLINK: raise PermissionError\n"
        "        super().__init__(family, *rest, **named)\n"
        "socket.socket, opened = Refused, open\n"
        "import builtins\n"
        "def closed(path, *rest, **named):\n"
        "    if str(path).startswith('/proc/net/'): raise PermissionError\n"
        "    return opened(path, *rest, **named)\n"
        "builtins.open = closed\n"
    )
    with store_host.hosted(before=before) as store:
        assert store.wait_for("open")["why"] == "the kernel does not report which user connects"
        assert store.client().num_keys() == 0


def test_all_nodes_of_a_run_sign_with_one_key_and_each_run_has_its_own(tmp_path: Path) -> None:
    keys: list[str] = []

    def left(token: bytes | None, name: str) -> str:
        """Return the key that an agent leaves for its workers."""
        path = tmp_path / str(len(keys))
        path.mkdir()
        rendezvous = None if token is None else SimpleNamespace(token=SimpleNamespace(key=token))
        plan: Any = SimpleNamespace(rendezvous=rendezvous)
        folder: Any = SimpleNamespace(path=str(path), name=name)
        store_process.leave_key(plan, folder)
        keys.append((path / signed_store.KEY_FILE).read_text())
        return keys[-1]

    one, two = b"1" * 32, b"2" * 32
    assert left(one, "run") == left(one, "run")
    assert len({left(one, "run"), left(one, "run-2"), left(two, "run"), left(None, "run"), left(None, "run")}) == 5
    assert one.hex() not in keys
    assert {len(key) for key in keys} == {64}
