"""Workers that do not leave their group."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.contract.messages import worker_messages as words
from phalanx.launcher.workers.regroup import unresponsive as module
from phalanx.launcher.workers.regroup.dispatcher import MessageDispatcher
from phalanx.launcher.workers.regroup.unresponsive import Unresponsive, UnresponsiveWatch
from phalanx.launcher.workers.worker import Worker, WorkerState
from phalanx.launcher.workers.workers import Workers
from tests.kit.placements import seat


def test_time_in_which_this_process_was_busy_does_not_count() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            unresponsive, until = Unresponsive(), time.monotonic() + 20
            while not unresponsive.among([process.pid], 0.05):  # once it sleeps, it is never seen to compute
                assert time.monotonic() < until
                time.sleep(0.01)
            unresponsive.excuse(-1.0)
            assert unresponsive.among([process.pid], 0.05) == [process.pid]
            unresponsive.excuse(100.0)  # it may have answered long ago
            assert unresponsive.among([process.pid], 0.05) == []
        finally:
            process.kill()


class Node:
    """Two workers of a node: one has joined the second group, the other has not. Signals are only recorded."""

    def __init__(self, pid: int, *, holds: bool) -> None:
        self.signals: list[str] = []
        self.notes: list[str] = []
        self.sent: list[words.FromAgent] = []
        fork_server = SimpleNamespace(send=lambda order: self.signals.append(order["name"]))
        self.workers = Workers(cast("Any", fork_server))
        for rank, of in enumerate((0, pid)):
            worker = Worker(seat(rank, 2), "", pid=of)
            worker.enter(WorkerState.RUNNING)
            worker.enter(WorkerState.CONNECTED)
            self.workers.add(f"worker {rank}", worker)
        self.workers["worker 0"].generations.entered = 1
        self.workers["worker 0"].generations.holds = holds
        self.late = self.workers["worker 1"]
        channels = SimpleNamespace(send=lambda _, message: self.sent.append(message))
        stopper = SimpleNamespace(stopping=False)
        self.watch = UnresponsiveWatch(self.workers, cast("Any", channels), cast("Any", stopper), self.notes.append)

    def watched(self, seconds: float, *, until: Callable[[], object] = lambda: False) -> None:
        """Watch for some time, or until something has happened."""

        async def watch() -> None:
            end = time.monotonic() + seconds
            self.watch.start(1)
            while time.monotonic() < end and not until():
                await asyncio.sleep(0.01)
            self.watch.cancel()

        asyncio.run(watch())


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process that sleeps."""
    monkeypatch.setattr(module, "_INTERVAL", 0.01)
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_a_blocked_worker_is_killed_once(asleep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its end takes, and whether it sleeps meanwhile or not."""
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    node = Node(asleep, holds=True)
    node.late.generations.blocked = True
    node.watched(10, until=lambda: len(node.signals) > 1)  # it is silent too
    node.watched(0.2)  # another rank has died
    assert node.notes == ["rank 1 cannot leave the group, its GPU does not answer: SIGKILL"]
    assert set(node.signals) == {"worker 1"}


def test_a_blocked_worker_may_save_the_only_state_first(asleep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    node = Node(asleep, holds=False)
    node.watched(10, until=lambda: node.sent)
    assert node.sent == [words.Rescue()]
    node.late.generations.blocked = True
    node.watched(0.1)
    assert node.signals == []
    monkeypatch.setattr(module, "SAVING", 0.0)  # it takes too long
    node.watched(10, until=lambda: node.signals)
    assert node.signals == ["worker 1"]


def test_a_worker_that_has_left_its_group_is_not_blocked_any_more(asleep: int) -> None:
    """The next heartbeat may come after the next group was lost."""
    node = Node(asleep, holds=True)
    parts = {name: SimpleNamespace(keep_spares=lambda: None) for name in ("regrouper", "spawner", "heartbeats")}
    report: Any = MessageDispatcher(
        node.workers,
        cast("Any", parts["regrouper"]),
        cast("Any", parts["spawner"]),
        heartbeats=cast("Any", parts["heartbeats"]),
        output=cast("Any", None),
        observer=cast("Any", None),
        measured=lambda _: None,
    )
    report.received(asleep, words.Heartbeat(3, blocked=True))
    assert node.late.generations.blocked
    report.received(asleep, words.Entering(0, True))
    node.watched(0.1)
    assert node.signals == []
