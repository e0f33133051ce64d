"""The state of the run after its events, and how it ended."""

from __future__ import annotations

import pytest

from phalanx.contract import events
from phalanx.watch.screen import lines
from tests.watch.model.run_events import FAULT, NOW, RESTART, STALL, VERDICT, model_of, sample, started

STATES = {
    "nothing": ([], "starting"),
    "gathering": ([events.RendezvousProgress(time=0, expected=2, joined=("a",), missing=("b",))], "gathering"),
    "gathered": (
        [
            events.RendezvousProgress(time=0, expected=2, joined=("a",), missing=("b",)),
            events.RendezvousProgress(time=0, expected=2, joined=("a", "b")),
        ],
        "starting",
    ),
    "importing": ([*started(), sample(2, -1, -1, phases="iiiii")], "starting"),
    "joining": ([*started(), sample(2, -1, -1, phases="iijjj")], "starting"),
    "without steps": ([*started(), sample(2, -1, -1, phases="jjnnn")], "running"),
    "steps": ([*started(), sample(2, 1, 1)], "running"),
    "not to be seen yet": ([*started(), *(sample(n, -1, -1, phases="." * 10) for n in range(2, 6))], "starting"),
    "not to be seen": ([*started(), *(sample(n, -1, -1, phases="." * 10) for n in range(2, 8))], "running"),
    "measured": ([*started(), events.MetricsMeasured(time=3, step=1, values={})], "running"),
    "stalled": ([*started(), sample(10, 7, 7), STALL], "stalled"),
    "stalled, seen": ([*started(), sample(10, 7, 7), STALL, VERDICT, sample(21, 8, 8), sample(22, 8, 8)], "stalled"),
    "continues": ([*started(), STALL, VERDICT, sample(21, 8, 8), sample(22, 9, 9)], "running"),
    "resumed": ([*started(), sample(2, 1, 1), STALL, VERDICT, events.Resumed(time=21, seconds=11)], "running"),
    "fault": ([*started(), sample(10, 7, 7), FAULT], "recovering"),
    "fault, and a sample from before": (
        [*started(), sample(9, 6, 6), FAULT, sample(10, 7, 7), sample(11, 8, 7)],
        "recovering",
    ),
    "continued": ([*started(), sample(9, 6, 6), FAULT, sample(11, 7, 7), sample(12, 8, 8)], "running"),
    "recovered": ([*started(), FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=8)], "running"),
    "restarting": ([*started(), RESTART, events.Stopping(time=10.5, reason="", signal="SIGTERM")], "recovering"),
    "restarted": ([*started(), sample(9, 6, 6), RESTART, events.Restarted(time=11, seconds=0.6), NOW], "starting"),
    "stopping": ([*started(), events.Stopping(time=2, reason="a signal", signal="SIGTERM")], "stopping"),
    "stopping, seen": (
        [
            *started(),
            sample(1, 1, 1),
            events.Stopping(time=2, reason="", signal="SIGTERM"),
            sample(3, 2, 2),
            sample(4, 3, 3),
        ],
        "stopping",
    ),
    "given up": ([*started(), events.FaultEvent(time=2, rank=0, reason="x", recovery="stop")], "stopping"),
    "preempted": ([*started(), events.Preempted(time=2, step=5, seconds=0.1)], "stopping"),
    "done": ([*started(), events.RunEnded(time=2, code=0, seconds=2), sample(3, 2, 2)], "done"),
    "failed": ([*started(), STALL, events.RunEnded(time=30, code=1, seconds=2), VERDICT], "failed"),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_the_run_after_events(name: str) -> None:
    happened, state = STATES[name]
    assert model_of(*happened).run.state == state


def test_a_run_that_is_preempted_has_not_failed() -> None:
    model = model_of(*started(), sample(9, 5, 5), events.Preempted(time=10, step=5, seconds=0.1))
    model.apply(events.WorkerExited(time=10.1, rank=1, pid=11, code=0))
    model.apply(events.WorkerExited(time=10.2, rank=0, pid=10, code=1))
    model.apply(events.RunEnded(time=10.3, code=75, seconds=10, preempted=True))
    assert [view.health for view in model.ranks.values()] == ["stopped", "done"]
    assert (model.run.state, model.run.words) == ("stopped", "preempted")
    assert model.timeline.latest[-1].text == "preempted, after 10 s"
    assert "preempted after" in lines.ending(model)


def test_a_script_that_exits_with_the_code_of_a_preemption_has_failed() -> None:
    model = model_of(*started(), events.RunEnded(time=10.3, code=75, seconds=10))
    assert (model.run.state, model.run.words) == ("failed", "failed (exit code 75)")


@pytest.mark.parametrize(
    ("number", "code", "ending"), [("SIGINT", 130, "stopped by Ctrl-C"), ("SIGTERM", 143, "stopped by SIGTERM")]
)
def test_a_run_that_the_user_stops_has_not_failed(number: str, code: int, ending: str) -> None:
    """Not even if a rank raises because another one ended first."""
    model = model_of(*started(), sample(9, 5, 5))
    model.apply(events.Stopping(time=10, reason=f"{number} received", signal=number))
    model.apply(events.WorkerExited(time=10.1, rank=1, pid=11, code=-15))
    model.apply(events.WorkerExited(time=10.2, rank=0, pid=10, code=1))
    model.apply(events.RunEnded(time=10.3, code=code, seconds=10))
    assert [view.health for view in model.ranks.values()] == ["stopped", "stopped"]
    assert (model.run.state, model.run.words) == ("stopped", ending)
    assert model.timeline.latest[-1].text == f"{ending}, after 10 s"


def test_a_worker_that_exits_with_the_code_of_a_signal_has_failed() -> None:
    model = model_of(*started(), sample(9, 5, 5), events.WorkerExited(time=10, rank=0, pid=10, code=130))
    model.apply(events.WorkerFailed(time=10.1, rank=0, summary="rank 0 failed: exit code 130", code=130))
    model.apply(events.RunEnded(time=10.3, code=130, seconds=10))
    assert (model.run.words, model.ranks[0].health) == ("failed (exit code 130)", "dead")
