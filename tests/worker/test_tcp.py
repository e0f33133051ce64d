"""A wrong address fails within seconds, with the reason; a late rank 0 is awaited."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.errors import PhalanxError, PortError
from phalanx.worker.rendezvous import tcp_store
from phalanx.worker.rendezvous.addresses import own
from phalanx.worker.rendezvous.identity import Identity
from phalanx.worker.rendezvous.methods import MeetingPoint, parse
from tests.kit.cli import free_port, python

SCRIPTS = Path(__file__).parent / "scripts"
KEEPER = Identity("hand-set variables", PartialPlacement(rank=0, world_size=2), hosts_store=True)
CALLER = Identity("hand-set variables", PartialPlacement(rank=1, world_size=2), hosts_store=False)


def place(host: str, port: int = 29500) -> MeetingPoint:
    return MeetingPoint("tcp", host, port, setting=f"MASTER_ADDR={host}")


def refusal(where: MeetingPoint, identity: Identity, timeout: float = 60) -> tuple[PhalanxError, float]:
    start = time.monotonic()
    with pytest.raises(PhalanxError) as caught:
        tcp_store.open_store(where, identity, timeout)
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize("identity", [KEEPER, CALLER])
def test_a_name_that_does_not_resolve(identity: Identity) -> None:
    error, seconds = refusal(place("no-such-host.invalid"), identity)
    assert "the name no-such-host.invalid does not resolve on" in error.what
    assert "MASTER_ADDR=ADDRESS_OF_RANK_0" in error.fix
    assert seconds < 10


def test_the_fix_repeats_the_given_method() -> None:
    error, _ = refusal(parse("tcp://192.0.2.7:4000").place or place(""), KEEPER)
    assert 'phalanx.init(method="tcp://' in error.fix
    assert ':4000"), the same for every rank' in error.fix


def test_rank_0_is_not_on_the_address() -> None:
    # An address of a documentation network, which no host has.
    error, seconds = refusal(place("192.0.2.7", free_port()), KEEPER)
    assert f"rank 0 runs on {socket.gethostname()}, but 192.0.2.7 is the address of another host" in error.what
    mine = [address for _, address in own()]
    assert f"MASTER_ADDR={mine[0] if mine else '127.0.0.1'}" in error.fix
    assert seconds < 10


def test_loopback_is_no_address_for_several_nodes() -> None:
    alone = PartialPlacement(rank=0, world_size=2, local_world_size=1)
    second = PartialPlacement(rank=1, world_size=2, local_world_size=1, node_rank=1)
    for identity in (replace(KEEPER, placement=alone), replace(CALLER, placement=second)):
        error, seconds = refusal(place("127.0.0.1", free_port()), identity)
        assert "127.0.0.1 is the loopback address, but the ranks are on several hosts" in error.what
        assert "with 1 ranks on this node" in str(error)
        assert seconds < 10


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error, seconds = refusal(place("127.0.0.1", port), KEEPER)
    assert isinstance(error, PortError)
    assert f"port {port} cannot be opened" in error.what
    assert "it is in use" in error.what
    assert f"MASTER_PORT={port + 1}" in error.fix
    assert seconds < 10


def test_the_store_of_a_launcher_that_has_gone() -> None:
    error, seconds = refusal(place("127.0.0.1", free_port()), replace(CALLER, launcher="torchrun", hosted=True))
    assert "the store of torchrun is gone" in error.what
    assert seconds < 10


def test_missing_ranks_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    error, seconds = refusal(place("127.0.0.1", port), CALLER, timeout=3.3)
    assert error.what == f"rank 0 is missing: no process listened on 127.0.0.1 port {port} within 3.3 s"
    assert f"this is rank 1 of 2 on {socket.gethostname()}" in str(error)
    assert 3.3 <= seconds < 20
    stderr = capfd.readouterr().err
    assert f"phalanx: rank 1 waits for rank 0 at 127.0.0.1 port {port}" in stderr
    assert "that is this host: is rank 0 on another one?" in stderr


@pytest.mark.extended
def test_a_foreign_server_and_a_late_rank_0() -> None:
    """In a separate process, because torch does not close its connection to a server that is not a store."""
    result = python(str(SCRIPTS / "store.py"))
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "a foreign server is named",
        "a slow store of the launcher is waited for",
        "rank 0 came later",
        "on the loopback alone",
    ]
