"""Ranks that leave a lost group late or never; and a group that is lost while it forms. Real processes, no GPU."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.contract import encoding, events
from phalanx.contract.messages import worker_messages as words
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.train.elastic.gpu_wait import GpuWait
from phalanx.train.elastic_loop import ElasticLoop
from phalanx.worker.process_group import nccl
from tests.kit.cli import until
from tests.train.elastic.surviving import ended, trained, undisturbed, warm

pytestmark = pytest.mark.xdist_group("survive")  # they share an undisturbed run
BLOCKED = "cannot leave the group, its GPU does not answer: SIGKILL"


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    with warm():
        yield


def replaced(err: str) -> list[int]:
    """Return the ranks that were replaced, in order."""
    folder = Path(re.findall(r"output in (\S+)", err)[0])
    recorded = [events.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    return sorted(event.rank for event in recorded if isinstance(event, events.FaultEvent))


def test_a_rank_whose_gpu_does_not_answer_is_replaced(tmp_path: Path) -> None:
    """It spins, as a CUDA call does, and NCCL's abort does not return on any rank."""
    done = trained(tmp_path, 3, [5, 2, "kill"], [5, 1, "spin"], words=("blocked",))
    assert done.code == 0, done.err
    assert done.err.count("cannot leave the group") == done.err.count(f"rank 1 {BLOCKED}") == 1
    assert replaced(done.err) == [1, 2]
    assert re.search(r"regrouped, and step 6 was committed [\d.]+ s later, no step lost", done.err)
    assert ended(tmp_path, 3)[0] == undisturbed(3)


def test_a_rank_that_computes_for_long_keeps_its_process(tmp_path: Path) -> None:
    done = trained(tmp_path, 3, [5, 2, "kill"], [5, 1, "compute"], words=("aborts",))
    assert done.code == 0, done.err
    assert "cannot leave the group" not in done.err
    assert replaced(done.err) == [2]
    assert ended(tmp_path, 3)[0] == undisturbed(3)


def test_a_rank_that_dies_while_the_group_forms_costs_no_step(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, [5, 1, "kill"], words=("forming",))
    assert done.code == 0, done.err
    assert (tmp_path / "forming").exists()
    assert [line for line in done.err.splitlines() if not re.match(r"phalanx: |\[0\] epoch ", line)] == []
    assert replaced(done.err) == [1, 1]
    assert re.search(r"regrouped, and step 6 was committed [\d.]+ s later, no step lost", done.err)
    assert ended(tmp_path, 2)[0] == undisturbed(2)


def test_a_group_in_which_all_ranks_wait_forms_again(tmp_path: Path) -> None:
    """Rank 1 receives nothing. Rank 0 waits in the same collective or, if it only had to send, in the next one. Rank 1
    alone has the state. It is not killed, unless gloo does not release it: then its state is saved first.
    """
    done = trained(tmp_path, 2, [5, 0, "kill"], options=("--stall-timeout", "6s"), words=("deaf",))
    assert done.code == 0, done.err
    assert re.search(r"probably: (all 2 ranks wait in the same collective|rank 1 is still in all_gather #1)", done.err)
    assert done.err.count("rank 0 is killed, so that the group forms again, with new connections") == 1
    assert replaced(done.err)[:2] == [0, 0]
    assert replaced(done.err)[2:] == [1] * done.err.count("rank 1 cannot leave the group; step 5 is saved in memory")
    assert re.search(r"regrouped, and step 6 was committed [\d.]+ s later, no step lost", done.err)
    assert ended(tmp_path, 2)[0] == undisturbed(2)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort does not return."""
    monkeypatch.setattr(nccl, "PATIENCE", 0.2)
    monkeypatch.setattr(nccl, "is_blocked", lambda: True)


def asked(ask: Callable[[], bool]) -> bool:
    """Return the answer that another thread gets while the main thread spins, as in a CUDA call."""
    spins, found = threading.Event(), list[bool]()
    threading.Thread(target=lambda: found.append(spins.wait() and ask())).start()
    spins.set()
    while not found:
        pass
    return found[0]


@pytest.mark.usefixtures("endless")
def test_a_main_thread_has_time_to_leave_each_group() -> None:
    wait = GpuWait()

    def soon(lost: int | None) -> bool:
        return asked(lambda: wait.is_endless(lost))

    def late(lost: int | None) -> bool:
        def ask() -> bool:
            until(lambda: wait.is_endless(lost), 10, "the main thread to have had its time")
            return True

        return asked(ask)

    assert not soon(0)
    assert late(0)
    assert not soon(1)  # another group
    assert late(1)
    assert not soon(None)
    assert not soon(1)


def test_a_rank_that_connects_has_time_from_when_its_gpu_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has nothing to abort then."""
    monkeypatch.setattr(nccl, "PATIENCE", 0.2)
    monkeypatch.setattr(nccl, "is_blocked", lambda: False)
    wait, ready = GpuWait(), threading.Event()

    def answers(seconds: float) -> set[bool]:
        found, end = set[bool](), time.monotonic() + seconds
        while time.monotonic() < end and True not in found:
            found.add(wait.is_endless(1))
            time.sleep(0.01)
        return found

    wait.connecting = True
    wait.warming = threading.Thread(target=ready.wait, daemon=True)
    wait.warming.start()
    assert answers(0.4) == {False}
    ready.set()
    wait.warming.join()
    assert answers(10) == {False, True}
    wait.connecting = False
    assert answers(0.4) == {False}


@pytest.mark.usefixtures("endless")
def test_a_script_that_goes_on_does_not_wait_for_the_gpu() -> None:
    wait, found = GpuWait(), list[bool]()

    def ask() -> None:
        for turn in (1, 2, 3):
            while at[0] != turn:
                time.sleep(0.001)
            found.append(wait.is_endless(0))
            time.sleep(0.3)  # longer than NCCL's abort may take
            at[0] = 0

    at = [1]
    threading.Thread(target=ask).start()
    while at[0] == 1:
        pass
    at[0] = 2
    while at[0] == 2:
        pass
    at[0] = 3
    while at[0] == 3:
        pass
    assert found == [False] * 3


PLACEMENT = RankPlacement(rank=0, world_size=2, local_rank=0, local_world_size=1, node_rank=0, node_count=2)


class Agent:
    """The agent of a worker whose main thread is in its first group."""

    def __init__(self, line: socket.socket, loop: ElasticLoop) -> None:
        self.line, self.loop = line, loop

    @staticmethod
    def assigned(generation: int) -> bytes:
        return encoding.encode(
            words.Assignment(generation=generation, placement=PLACEMENT, topology="", address="", port=0)
        )

    def beats(self, count: int) -> list[words.Heartbeat]:
        """Return the next heartbeats of the worker."""
        found: list[words.Heartbeat] = []
        while len(found) < count:
            message = words.from_worker.decode(self.line.recv(encoding.PACKET_LIMIT))
            if isinstance(message, words.Heartbeat):
                found.append(message)
        return found


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    for variable in nccl.VARIABLES:
        monkeypatch.setenv(variable, "0")
    name = f"phalanx-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"\0{name}")
        server.listen()
        made: list[ElasticLoop] = []
        worker = threading.Thread(target=lambda: made.append(ElasticLoop(name, {})))
        worker.start()
        line, _ = server.accept()
        with line:
            line.settimeout(10)
            line.send(Agent.assigned(0))
            worker.join(10)
            (loop,) = made
            loop._assignment = loop._channel.assignment
            yield Agent(line, loop)
            loop.close()
            for thread in threading.enumerate():
                if thread.name == "phalanx-channel":
                    thread.join(10)


@pytest.mark.usefixtures("endless")
def test_while_there_are_too_few_nodes_no_rank_has_to_leave(agent: Agent) -> None:
    """Its main thread waits with the state of the lost group; its agent would kill it when another node arrives."""
    agent.line.send(encoding.encode(words.Wait()))
    assert [beat.blocked for beat in agent.beats(2)] == [False, False]
    agent.line.send(agent.assigned(1))
    assert [beat.blocked for beat in agent.beats(2)] == [False, True]


def test_a_group_that_the_script_created_while_its_group_was_cut_is_aborted_too(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script waits in it for a rank that has left or died, and nothing else ends that."""

    class Backend:
        def abort(self) -> None:
            aborted.set()

    aborted, backends = threading.Event(), list[Backend]()
    monkeypatch.setattr(nccl, "_backends", lambda: backends)
    monkeypatch.setattr(nccl, "_aborting", {})
    counter: Any = SimpleNamespace(steps=3, samples=12)
    agent.loop._recovery = cast("Any", SimpleNamespace(counter=counter))  # `train` runs
    agent.line.send(agent.assigned(1))
    agent.beats(1)
    backends.append(Backend())
    assert [beat.step for beat in agent.beats(2)] == [3, 3]
    assert aborted.wait(10)
    until(lambda: not nccl.is_blocked(), 10, "the abort to return")
    agent.loop._recovery = None


def test_a_group_that_is_not_lost_is_not_cut(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[bool] = []
    monkeypatch.setattr(nccl, "abort", lambda: cuts.append(True))
    agent.loop._recovery = cast("Any", SimpleNamespace(counter=SimpleNamespace(steps=3, samples=12)))
    agent.beats(2)
    agent.loop._recovery = None
    agent.beats(1)
    assert cuts == []
