"""The list of events: each one once, as text."""

from __future__ import annotations

import pytest

from phalanx.contract import events
from phalanx.contract.events import RankSample
from tests.watch.model.run_events import FAULT, STALL, VERDICT, model_of, started


def test_each_event_is_listed_once_and_in_words() -> None:
    note = "rank 1 failed: SIGKILL (Killed); regrouped, and step 74 was committed 0.07 s later, no step lost"
    failed = "rank 0 failed: ValueError: x"
    model = model_of(
        *started(),
        events.NoteEvent(time=2, text="chaos"),
        events.NoteEvent(time=3, text="chaos"),
        FAULT,
        events.Recovered(time=11, generation=1, seconds=0.067, step=74, redone=1),
        events.NoteEvent(time=11, text=note, repeats=True),
        events.FaultEvent(time=12, rank=0, reason=failed, recovery="stop"),
        events.Stopping(time=12, reason=failed, signal="SIGTERM"),
        events.WorkerFailed(time=13, rank=0, summary=failed, code=1),
        events.RunEnded(time=14, code=1, seconds=14),
    )
    assert [(one.kind, one.text) for one in model.timeline.latest] == [
        ("note", "chaos"),
        ("fault", "rank 1 failed: SIGKILL (Killed)"),
        ("recovered", "recovered in 0.07 s: step 74 is committed, 1 step done again"),
        ("fault", failed),
        ("end", "failed with exit code 1, after 14 s"),
    ]
    assert model.problems.cause is not None
    assert model.problems.cause.ranks == (0,)


def test_nodes_that_join_are_listed() -> None:
    model = model_of(
        events.RendezvousProgress(time=0, expected=3, joined=("a",), missing=("b", "c")),
        events.RendezvousProgress(time=5, expected=3, joined=("a", "c"), missing=("b",)),
    )
    model.apply(events.NoteEvent(time=6, text="2 of 3 nodes are here, waiting for b (3 s)", repeats=True))
    assert model.run.rendezvous is not None
    assert model.run.rendezvous.missing == ("b",)
    model.apply(events.RendezvousProgress(time=9, expected=3, joined=("a", "b", "c")))
    assert model.run.rendezvous is None
    model.apply(events.FaultEvent(time=20, rank=0, reason="d joined", recovery="regroup", kind="node-joined"))
    assert model.run.state == "recovering"
    assert [(one.kind, one.text) for one in model.timeline.latest] == [
        ("joined", "c: 2 of 3 nodes joined"),
        ("joined", "b: 3 of 3 nodes joined"),
        ("joined", "d joined"),
    ]


def test_two_nodes_of_the_same_name_are_counted() -> None:
    model = model_of(
        events.RendezvousProgress(time=0, expected=2, joined=("vm",), missing=("node 1",)),
        events.RendezvousProgress(time=5, expected=2, joined=("vm", "vm")),
    )
    assert [one.text for one in model.timeline.latest] == ["vm: 2 of 2 nodes joined"]


@pytest.mark.parametrize(("slow", "also"), [(1, ""), (3, " (and 2 more)")])
def test_a_straggler_is_listed_now_and_then(slow: int, also: str) -> None:
    model = model_of(*started(8))
    for second in range(2, 700):
        samples = tuple(
            RankSample(rank=rank, step=second, phases="dddwwwfffO" if rank < slow else "wwwwwwfffO")
            for rank in range(8)
        )
        model.apply(events.ClusterSample(time=second, seconds=1.0, ranks=samples))
    expected = "rank 0 kept the others waiting 30% of the last {}, mostly in data loading" + also
    assert [one.text for one in model.timeline.latest] == [expected.format("20 s"), expected.format("minute")]
    assert [model.ranks[rank].health for rank in range(4)] == ["slow"] * slow + ["healthy"] * (4 - slow)
    model.apply(STALL)
    assert model.ranks[0].health == "healthy", "a stalled rank is not slow"


def test_verdicts_stay_until_the_run_resumes() -> None:
    model = model_of(*started(), STALL, VERDICT)
    assert [one.text for one in model.problems.verdicts] == [VERDICT.text]
    model.apply(events.Stalled(time=40, seconds=30))
    assert model.problems.verdicts == [], "new ones follow"
    model.apply(VERDICT)
    model.apply(events.RunEnded(time=50, code=1, seconds=50))
    assert [one.text for one in model.problems.verdicts] == [VERDICT.text], "nothing progressed when it ended"
