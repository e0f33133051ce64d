"""The cost of faults: repeated steps count as lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.launcher.coordination import recoveries
from phalanx.launcher.coordination.lost_time import time_of_steps
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import RecoveryAction, RestartPolicy


class Folder:
    stalled = 0.0

    def __init__(self) -> None:
        self.events: list[object] = []

    def event(self, event: object) -> None:
        self.events.append(event)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def failure(step: int | None, idle: float = 0.3) -> WorkerFailure:
    return WorkerFailure(
        rank=1, reason="rank 1 failed: SIGKILL", place="", time=0.0, uptime=10.0, step=step, generation=0, idle=idle
    )


def lived(monkeypatch: pytest.MonkeyPatch, *, resumed_at: int) -> tuple[str, str, list[object]]:
    """Simulate 60 steps in 30 s, a death, 2 s to the next step, and 30 s for the rest."""
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(None), folder)  # type: ignore[arg-type]
    clock.now += 5
    assert found.first_step(0, 1) == ""  # of rank 0, and then of rank 1
    clock.now += 1
    assert found.first_step(0, 1) == ""
    clock.now += 29
    found.decide(failure(step=59), can_regroup=True)
    clock.now += 2
    line = found.first_step(1, resumed_at + 1, before=61)
    clock.now += 23
    return line, found.summary(), folder.events


def test_without_a_step_there_is_no_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(None), folder)  # type: ignore[arg-type]
    found.decide(failure(step=None), can_regroup=True)
    clock.now += 20
    assert found.summary() == "1 fault survived; no step was committed"
    assert not any(isinstance(event, events.GoodputMeasured) for event in folder.events)


def test_steps_that_are_computed_again_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    line, summary, published = lived(monkeypatch, resumed_at=0)
    assert line.endswith("step 1 was committed 2.00 s later, 61 steps done again")
    # 2 s, and 61 steps of half a second.
    assert summary == "1 fault survived, 32.5 s of 55 s lost: goodput 40.9%"
    assert [event.redone for event in published if isinstance(event, events.Recovered)] == [61]


def test_without_a_lost_step_only_the_interruption_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    line, summary, _ = lived(monkeypatch, resumed_at=61)
    assert line.endswith("no step lost")
    assert summary == "1 fault survived, 2.0 s of 55 s lost: goodput 96.4%"


def test_nothing_is_known_about_the_time_of_a_step_that_is_the_first() -> None:
    assert time_of_steps(3, took=5.0, steps=0) == 0.0
    assert time_of_steps(3, took=6.0, steps=9) == 2.0


def test_lost_time_counts_from_the_last_step_and_not_from_when_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank hangs for 53 s of 65 s, and is then replaced."""
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(None), folder)  # type: ignore[arg-type]
    clock.now += 5
    found.first_step(0, 1)
    clock.now += 5 + 53
    found.decide(failure(step=11, idle=53.0), can_regroup=True)
    clock.now += 1
    line = found.first_step(1, 12, before=11)
    assert line.endswith("step 12 was committed 1.00 s later, no step lost, after 53 s without a step")
    clock.now += 6
    assert found.summary() == "1 fault survived, 54.0 s of 65 s lost: goodput 16.9%"
    fault, recovered, measured = folder.events
    assert isinstance(fault, events.FaultEvent)
    assert isinstance(recovered, events.Recovered)
    assert isinstance(measured, events.GoodputMeasured)
    assert (fault.idle, recovered.idle, recovered.seconds) == (53.0, 53.0, 1.0)
    assert (measured.lost, measured.seconds) == (54.0, 65.0)


def test_the_time_before_a_node_counts_as_lost_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes cannot reach each other for 20 s, until one of them is dismissed."""
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(None), folder)  # type: ignore[arg-type]
    found.first_step(0, 1)
    clock.now += 10 + 20
    found.nodes_changed(failure(step=None, idle=20.0), RecoveryAction.REGROUP)
    clock.now += 2
    assert found.first_step(1, 12).endswith("after 20 s without a step")
    clock.now += 8
    assert found.summary() == "1 change of nodes, 22.0 s of 40 s lost: goodput 45.0%"
    fault, recovered, _ = folder.events
    assert isinstance(fault, events.FaultEvent)
    assert isinstance(recovered, events.Recovered)
    assert (fault.idle, recovered.idle) == (20.0, 20.0)


def test_a_step_of_an_earlier_group_ends_no_outage_and_counts_for_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(None), folder)  # type: ignore[arg-type]
    found.first_step(0, 1)
    found.decide(failure(step=1, idle=0.0), can_regroup=True)
    assert found.first_step(0, 2) == ""
    clock.now += 1
    assert found.first_step(1, 2).endswith("step 2 was committed 1.00 s later, no step lost")
    clock.now += 15
    assert found.first_step(0, 9) == ""
    clock.now += 5
    found.decide(failure(step=12, idle=0.0), can_regroup=True)
    assert found.first_step(2, 3).endswith("10 steps done again")
    # 1 s, and 10 steps of 2 s: 10 steps took 20 s.
    assert found.summary() == "2 faults survived, 21.0 s of 21 s lost: goodput 0.0%"


def test_where_a_script_failed_is_shown_once() -> None:
    found = Recoveries(RestartPolicy(None), Folder())  # type: ignore[arg-type]
    shown = []
    for generation in range(2):
        found.decide(replace(raised(0, "KeyError: 'x'", "t.py:4"), frames=("t.py:4 in load",)), can_regroup=True)
        shown.append(found.first_step(generation + 1, 6).split("\n")[1:])
    assert shown == [["t.py:4 in load"], []]


def test_if_no_rank_has_kept_its_state_the_line_names_the_step_that_was_resumed() -> None:
    found = Recoveries(RestartPolicy(None), Folder())  # type: ignore[arg-type]
    found.decide(replace(failure(step=None), all_workers=True), can_regroup=True)
    assert found.first_step(1, 7).endswith("from step 6 on")
    found.decide(replace(failure(step=9), all_workers=True), can_regroup=True)
    assert found.first_step(2, 7).endswith("3 steps done again")


def test_a_skipped_batch_alone_has_a_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(None), folder)  # type: ignore[arg-type]
    found.first_step(0, 1)
    clock.now += 10
    line = found.batch_skipped(worker_messages.SkippedBatch(4, "loss is nan", 1.0))
    assert line == "step 4: loss is nan; its update was dropped and its batch skipped (--on-nan rollback)"
    assert found.summary() == "1 batch skipped, 1.0 s of 10 s lost: goodput 90.0%"


def test_a_restart_is_counted_against_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, folder = Clock(), Folder()
    monkeypatch.setattr(recoveries, "time", clock)
    found = Recoveries(RestartPolicy(3), folder)  # type: ignore[arg-type]
    assert found.decide(failure(step=None, idle=0.0), can_regroup=False) is RecoveryAction.RESTART
    clock.now += 2
    assert found.restarting() == "starting all ranks again: restart 1 of 3, 2.00 s later"
    clock.now += 3
    assert found.summary() == "1 fault survived, 2.0 s of 5 s until all ranks were started again"
    found.nodes_changed(failure(step=None, idle=0.0), RecoveryAction.RESTART)
    assert found.restarting() == "starting all ranks again, 0.00 s later"


@pytest.mark.parametrize(
    ("generation", "recovered", "action"),
    [
        (0, False, RecoveryAction.REGROUP),
        (1, False, RecoveryAction.STOP),  # of the group that replaces the first
        (-1, False, RecoveryAction.STOP),  # it had not joined any
        (0, True, RecoveryAction.STOP),
    ],
)
def test_ranks_of_a_group_that_fail_together_count_once(generation: int, recovered: bool, action: object) -> None:
    found = Recoveries(RestartPolicy(1), Folder())  # type: ignore[arg-type]
    assert found.decide(failure(step=5), can_regroup=True) is RecoveryAction.REGROUP
    if recovered:
        found.first_step(1, 6)
    again = replace(failure(step=5), generation=generation)
    assert found.would_stop(again, can_regroup=True) == (action is RecoveryAction.STOP)
    assert found.decide(again, can_regroup=True) is action
    if action is RecoveryAction.STOP:
        assert found.final_text("rank 1 failed") == "rank 1 failed\n  1 recovery was allowed, and is used up"
    else:
        assert found.final_text("rank 1 failed") == "rank 1 failed"


def test_a_question_about_a_failure_records_nothing() -> None:
    folder = Folder()
    found = Recoveries(RestartPolicy(3), folder)  # type: ignore[arg-type]
    assert not found.would_stop(failure(step=5), can_regroup=False)  # a restart
    assert Recoveries(RestartPolicy(0), folder).would_stop(failure(step=5), can_regroup=True)  # type: ignore[arg-type]
    assert (folder.events, found.generation, found.summary()) == ([], 0, "")


def raised(rank: int, text: str, place: str) -> WorkerFailure:
    return WorkerFailure(rank=rank, reason=f"rank {rank} failed: {text}", place=place, time=0.0, uptime=9.0, step=5)


def test_an_exception_of_all_ranks_is_named_once() -> None:
    mismatch = "ranks called different things: rank 0 all_gather, ranks 1 and 2 all_reduce"
    quoted = f"RuntimeError: Got the following error when running the callback: CollectiveMismatch: {mismatch}"
    table: list[tuple[list[WorkerFailure], str]] = [
        ([raised(rank, "KeyError: 'x'", "t.py:4") for rank in (2, 1, 0)],
         "rank 2 failed: KeyError: 'x', ranks 0, 1 failed in the same way"),
        ([raised(1, quoted, "t.py:4"), raised(2, quoted, "t.py:4"), raised(0, mismatch, "t.py:9")],
         f"rank 0 failed: {mismatch}, ranks 1, 2 failed in the same way"),
        ([raised(0, "KeyError: 'x'", "t.py:4"), raised(1, "ValueError: y", "t.py:5")],
         "rank 0 failed: KeyError: 'x', rank 1 failed: ValueError: y"),
        ([raised(0, "OutOfMemoryError: CUDA", "t.py:4"), raised(1, "PeerLost: rank 0 has ended", "t.py:4")],
         "rank 0 failed: OutOfMemoryError: CUDA, rank 1 failed: PeerLost: rank 0 has ended"),
        ([raised(0, "AssertionError", "t.py:4"), raised(1, "AssertionError on node 1 (b)", "t.py:4")],
         "rank 0 failed: AssertionError, rank 1 failed in the same way"),
        ([raised(0, "AssertionError", "t.py:4"), raised(1, "AssertionError: no data", "t.py:4")],
         "rank 0 failed: AssertionError, rank 1 failed in the same way"),
        ([raised(0, "AssertionError", "t.py:4"), raised(1, "AssertionError: no data", "t.py:5")],
         "rank 0 failed: AssertionError, rank 1 failed: AssertionError: no data"),
        ([raised(0, "SIGKILL (Killed)", ""), raised(1, "SIGKILL (Killed)", "")],
         "rank 0 failed: SIGKILL (Killed), rank 1 failed: SIGKILL (Killed)"),
        ([raised(0, "ValueError: y", "t.py:5")] * 2, "rank 0 failed: ValueError: y"),
    ]  # fmt: skip
    lost = [WorkerFailure(rank, f"the store was ended on node {rank}", "store", 0.0, 9.0, 5) for rank in (0, 1)]
    assert recoveries.reasons(lost) == "the store was ended on node 0, the store was ended on node 1"
    for failures, text in table:
        assert recoveries.reasons(failures) == text
