"""The parts of a worker group, each separately."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from phalanx.contract.messages import worker_messages
from phalanx.forkserver import linux
from phalanx.launcher.actions import RegroupPlan
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.workers.failures import Failures
from phalanx.launcher.workers.formation import Formation
from phalanx.launcher.workers.regroup.heartbeats import HeartbeatWatch
from phalanx.launcher.workers.regroup.regrouper import ReadinessReporter, Regrouper
from phalanx.launcher.workers.regroup.spares import SparePool
from phalanx.launcher.workers.spawner import Spawner
from phalanx.launcher.workers.stopper import Stopper, escalation
from phalanx.launcher.workers.worker import StepProgress, Worker, WorkerFailure, WorkerState
from phalanx.launcher.workers.worker_group import WorkerGroup
from phalanx.launcher.workers.workers import Workers
from tests.kit.cli import until
from tests.kit.placements import seat


class ForkServer:
    """Records orders."""

    def __init__(self) -> None:
        self.signals: list[tuple[str, int]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.signals.append((message["name"], message["signal"]))


class Channels:
    """Records messages to workers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send(self, pid: int, message: Any) -> None:
        self.sent.append((pid, message))


class Observer:
    """Records the readiness."""

    def __init__(self) -> None:
        self.reported: list[tuple[bool, bool, bool]] = []

        self.left = 0

    def rank_left(self) -> None:
        self.left += 1

    def regroup_ready(self, connected: bool, finished: bool, all_connected: bool) -> None:
        self.reported.append((connected, finished, all_connected))


def worker(rank: int, *states: WorkerState, spare: bool = False) -> Worker:
    made = Worker(seat(rank, 2), "", pid=100 + rank, spare=spare)
    for state in states:
        made.enter(state)
    return made


def group(*ranks: Worker) -> tuple[Workers, ForkServer]:
    server: Any = ForkServer()
    workers = Workers(server)
    for name, one in enumerate(ranks):
        workers.add(str(name), one)
    return workers, server


CONNECTED = (WorkerState.RUNNING, WorkerState.CONNECTED)


def test_workers_are_found_by_pid_and_state() -> None:
    workers, server = group(worker(0), worker(1), worker(2, spare=True))
    workers["1"].exited(3)
    workers["2"].exited(1)
    assert [name for name, _ in workers.living] == ["0"]
    assert workers.failed == [workers["1"]]
    assert workers.ranks == {100: 0, 101: 1, 102: 2}
    assert workers.with_pid(100) is workers["0"]
    assert workers.with_pid(101) is None
    workers.end_as("0", 0)
    assert (workers["0"].exit.counts_as, server.signals) == (0, [("0", signal.SIGKILL)])


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGTERM, [(signal.SIGKILL, 30.0)]),
        (signal.SIGINT, [(signal.SIGTERM, 10.0), (signal.SIGKILL, 20.0)]),
        (signal.SIGHUP, [(signal.SIGTERM, 10.0), (signal.SIGKILL, 20.0)]),
    ],
)
def test_signals_get_stronger_within_the_grace(
    number: signal.Signals, expected: list[tuple[signal.Signals, float]]
) -> None:
    assert escalation(number, 30.0) == expected


def test_a_worker_in_a_debugger_is_not_interrupted() -> None:
    workers, server = group(worker(0), worker(1))
    workers.debugged = frozenset({1})
    channels: Any = Channels()
    folder: Any = SimpleNamespace(event=lambda event: None)
    notes: list[str] = []

    async def scenario() -> None:
        stopper = Stopper(workers, channels, folder, notes.append)
        assert not stopper.stopping
        stopper.stop(signal.SIGINT, "SIGINT received", 0.03)
        assert stopper.stopping
        assert server.signals == [("0", signal.SIGINT), ("1", signal.SIGTERM)]
        workers["1"].exited(0)
        while len(server.signals) < 4:
            await asyncio.sleep(0.005)
        stopper.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20.0))
    assert server.signals[2:] == [("0", signal.SIGTERM), ("0", signal.SIGKILL)]
    assert [message.signal for pid, message in channels.sent if pid == 100] == [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGKILL,
    ]
    assert len(notes) == 2
    assert all(one.stopped and one.exit.stop_sent for one in workers.values())


def test_readiness_is_reported_when_it_changes() -> None:
    observer: Any = Observer()
    readiness = ReadinessReporter(observer)
    ranks = [worker(0), worker(1), worker(2, *CONNECTED, spare=True)]
    readiness.update(ranks, spare_node=False)
    assert observer.reported == []
    for one in ranks[:2]:
        for state in CONNECTED:
            one.enter(state)
        readiness.update(ranks, spare_node=False)
        readiness.update(ranks, spare_node=False)
    assert observer.reported == [(True, False, False), (True, False, True)]
    ranks[0].exited(0)
    readiness.update(ranks, spare_node=False)
    assert observer.reported[-1] == (True, True, True)
    readiness.update([], spare_node=False)  # it stays known that the script can regroup
    assert observer.reported[-1] == (True, False, True)


@pytest.mark.parametrize("finished", [False, True])
def test_the_others_wait_for_no_group_without_a_rank_that_left_in_mid_training(finished: bool) -> None:
    gone = worker(1, *CONNECTED, *([WorkerState.FINISHED] if finished else ()))
    workers, _ = group(worker(0, *CONNECTED), gone, worker(2, WorkerState.RUNNING), worker(3, *CONNECTED, spare=True))
    channels, observer = Channels(), Observer()
    parts: Any = {
        "formation": SimpleNamespace(plan=SimpleNamespace(group=SimpleNamespace(spare=False))),
        "context": SimpleNamespace(folder=None, note=None, observer=observer),
        "workers": workers,
        "channels": channels,
        "spawner": None,
        "stopper": None,
        "output": None,
    }
    regrouper = Regrouper(**parts)
    gone.exited(0)
    regrouper.left(gone)
    assert observer.reported[-1][1], "no regroup any more"
    assert observer.left == (not finished)
    regrouper.refuse()
    assert channels.sent == [(100, worker_messages.NoRegroup())]


def test_a_spare_is_replaced_after_the_recovery_that_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(SparePool, "keep", lambda _, formation: kept.append(formation.generation))
    workers, _ = group(worker(0, *CONNECTED), worker(1, *CONNECTED))
    plan: Any = SimpleNamespace(seats=(), group=SimpleNamespace(spare=False))
    parts: Any = {
        "formation": Formation(plan, 0),
        "context": SimpleNamespace(folder=None, note=None, observer=Observer()),
        "workers": workers,
        "channels": Channels(),
        "spawner": None,
        "stopper": SimpleNamespace(stopping=False),
        "output": SimpleNamespace(renumber=lambda _: None),
    }
    regrouper = Regrouper(**parts)
    regrouper.unresponsive = cast("Any", SimpleNamespace(start=lambda _: None))
    regrouper.report_readiness()
    regrouper.keep_spares()
    assert kept == [0], "before the first step"
    regrouper.regroup(RegroupPlan(1, "", plan, None))
    regrouper.keep_spares()
    workers["0"].generations.formed = 1
    regrouper.keep_spares()
    assert kept == [0], "while the group forms"
    workers["1"].generations.formed = 1
    regrouper.keep_spares()
    assert kept == [0, 1]


def test_on_a_node_of_spares_they_count() -> None:
    observer: Any = Observer()
    ReadinessReporter(observer).update([worker(0, *CONNECTED, spare=True)], spare_node=True)
    assert observer.reported == [(True, False, True)]


def ordering(server: Any, folder: Path) -> Workers:
    """Order a worker from this fork server, and return all workers."""
    workers = Workers(server)
    context = MagicMock(board=None, sources=None)
    context.folder.rank_folder.return_value = str(folder)
    output = MagicMock()
    output.open.return_value = (1, 2)
    formation = MagicMock()
    formation.plan.command.kind, formation.plan.stdin_rank = "script", -1
    spawner = Spawner(0, context, workers, output, channel="", hints=None, on_probe_message=MagicMock())
    spawner.start(formation, seat(1, 2))
    return workers


def test_a_worker_that_is_ordered_from_a_fork_server_that_has_just_ended_is_not_forgotten(tmp_path: Path) -> None:
    """It is lost with the fork server. Otherwise nobody would start it again."""
    server: Any = MagicMock(mode="cold", closed=False)
    server.send.side_effect = BrokenPipeError
    [(_, ordered)] = ordering(server, tmp_path).living
    assert (ordered.seat.rank, ordered.pid, server.send.call_count) == (1, 0, 1)


def test_no_worker_is_ordered_while_a_lost_fork_server_is_being_replaced(tmp_path: Path) -> None:
    """Its loss was handled before, so the worker would never count as exited, and the attempt would never end."""
    server = ForkServerClient(socket.socket(socket.AF_UNIX), "cold", ready={"pid": 1})
    server.gone()
    assert not ordering(server, tmp_path)


def test_a_worker_without_a_heartbeat_is_killed_once() -> None:
    workers, server = group(
        worker(0),  # it imports
        worker(1, *CONNECTED),
        worker(2, *CONNECTED),
        worker(3, *CONNECTED, WorkerState.FINISHED),
        worker(4, *CONNECTED),
    )
    for name in "1234":
        workers[name].last_heartbeat = 7.0
    workers.debugged = frozenset({2})
    notes: list[str] = []
    watch = HeartbeatWatch(workers, 3.0, notes.append)
    for heartbeat in (8.0, 9.0, 10.0, 10.0, 10.0):
        workers["4"].last_heartbeat = heartbeat
        watch.check()
    assert server.signals == [("1", signal.SIGKILL)]
    assert len(notes) == 1
    assert notes[0].startswith("rank 1 is silent for 3 s (")
    watch.check()
    assert server.signals == [("1", signal.SIGKILL), ("4", signal.SIGKILL)]


def test_a_worker_that_is_stopped_before_it_connects_is_killed() -> None:
    workers, server = group(worker(0), worker(1))
    notes: list[str] = []
    watch = HeartbeatWatch(workers, 2.0, notes.append)
    with subprocess.Popen(["sleep", "600"]) as process:
        workers["1"].pid = process.pid
        try:
            for _ in range(5):
                watch.check()
            assert server.signals == []  # it may import for any time
            process.send_signal(signal.SIGSTOP)
            until(lambda: linux.state(process.pid) == "stopped", 60, "the process to stop")
            watch.check()
            assert server.signals == []
            watch.check()
            assert server.signals == [("1", signal.SIGKILL)]
            assert notes == ["rank 1 is silent for 2 s (stopped): SIGKILL"]
        finally:
            process.kill()


def test_a_worker_waits_if_it_is_a_spare_or_its_group_is_held() -> None:
    plan: Any = SimpleNamespace(shutdown=SimpleNamespace(preempt_signals=(signal.SIGUSR1,)), group=None)
    waits = worker_messages.Wait("", (int(signal.SIGUSR1),))
    assert Formation(plan, 1).assignment(worker(0, spare=True)) == waits
    held = Formation(plan, 1, held="1 of 2 nodes is left")
    assert held.assignment(worker(0)) == worker_messages.Wait("1 of 2 nodes is left", (int(signal.SIGUSR1),))


def test_optimizer_steps_match_committed_steps_if_both_advance_equally() -> None:
    progress = StepProgress()
    progress.committed(10, 110)
    assert not progress.steps_match
    progress.committed(20, 120)
    assert (progress.steps_match, progress.step, progress.slot_step) == (True, 20, 120)
    progress.committed(21, 124)  # several optimizer steps per committed step
    assert not progress.steps_match


def test_a_rank_that_was_killed_for_memory_is_reported_as_such_when_it_is_replaced() -> None:
    workers, _ = group(worker(0, *CONNECTED), worker(1, *CONNECTED))
    output: Any = SimpleNamespace(tail=lambda *_: [], shown=lambda _: "whole", failed=lambda *_: None)
    reported: list[WorkerFailure] = []
    parts: Any = SimpleNamespace(
        workers=workers,
        output=output,
        failures=Failures(workers, output),
        number=0,
        stopping=False,
        _context=SimpleNamespace(
            memory_kill=lambda pid: f"the kernel killed {pid} for memory",
            folder=SimpleNamespace(event=lambda _: None),
            worker_failed=reported.append,
        ),
        _channels=SimpleNamespace(drain=lambda _: None),
        _probe_message=lambda *_: None,
        _timeout_victims=SimpleNamespace(take=lambda _: False),
    )
    WorkerGroup.worker_exited(parts, {"name": "1", "pid": 101, "status": int(signal.SIGKILL), "peak": 0})
    (failure,) = reported
    assert failure.reason == "rank 1 failed: SIGKILL (Killed), the kernel killed 101 for memory"
    assert failure.place == "SIGKILL (Killed)"  # the same again without progress ends the run
