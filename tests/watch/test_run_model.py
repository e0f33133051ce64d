"""One event after the other, and what is to be seen then."""

from __future__ import annotations

import statistics
import time
from typing import get_args

import pytest
from hypothesis import given, settings

from phalanx.contract import events
from phalanx.contract.events import RankInfo, RankSample
from phalanx.watch.model import simulation
from phalanx.watch.model.events_timeline import KINDS
from phalanx.watch.model.rank import HEALTH
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.status import State
from tests.watch.any_events import EVENTS

Any = events.AnyEvent


def started(ranks: int = 2) -> list[Any]:
    return [
        events.RunStarted(time=0, run="r", command=("train.py",), world_size=ranks, pid=9),
        events.AttemptStarted(time=1, attempt=0),
        *(events.WorkerStarted(time=1, rank=rank, pid=10 + rank) for rank in range(ranks)),
    ]


def sample(
    when: float, *steps: int, phases: str = "ddffbbwwoO", generation: int = 0, **more: object
) -> events.ClusterSample:
    samples = tuple(
        RankSample(rank=rank, step=step, phases=phases, compute=0.5, data=0.25, waiting=0.25, **more)  # type: ignore[arg-type]
        for rank, step in enumerate(steps)
    )
    return events.ClusterSample(time=when, seconds=1.0, generation=generation, ranks=samples)


def told(*happened: Any) -> RunModel:
    model = RunModel()
    for event in happened:
        model.apply(event)
    return model


FAULT = events.FaultEvent(time=10.4, rank=1, reason="rank 1 failed: SIGKILL (Killed)", recovery="regroup")
RESTART = events.FaultEvent(time=10.4, rank=1, reason="rank 1 failed: SIGKILL (Killed)", recovery="restart")
STALL = events.Stalled(time=20, seconds=10)
VERDICT = events.VerdictEvent(time=20, kind="data", text="rank 1 is in data loading", ranks=(1,))
NOW = events.AttemptStarted(time=12, attempt=1)

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
    "goes on": ([*started(), STALL, VERDICT, sample(21, 8, 8), sample(22, 9, 9)], "running"),
    "resumed": ([*started(), sample(2, 1, 1), STALL, VERDICT, events.Resumed(time=21, seconds=11)], "running"),
    "fault": ([*started(), sample(10, 7, 7), FAULT], "recovering"),
    "fault, and a sample from before": (
        [*started(), sample(9, 6, 6), FAULT, sample(10, 7, 7), sample(11, 8, 7)],
        "recovering",
    ),
    "went on": ([*started(), sample(9, 6, 6), FAULT, sample(11, 7, 7), sample(12, 8, 8)], "running"),
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
def test_the_state_of_the_run(name: str) -> None:
    happened, state = STATES[name]
    assert told(*happened).run.state == state


def _health(*happened: Any) -> list[str]:
    return [view.health for _, view in sorted(told(*happened).ranks.items())]


HEALTHS = {
    "born": ([], ["starting", "starting"]),
    "importing": ([sample(2, -1, -1, phases="iii")], ["starting", "starting"]),
    "healthy": ([sample(2, 1, 1)], ["healthy", "healthy"]),
    "ended": ([events.WorkerExited(time=2, rank=1, pid=11)], ["starting", "done"]),
    "ended, seen": ([sample(2, 1, 1, state="E")], ["done", "done"]),
    "died": ([events.WorkerExited(time=2, rank=1, pid=11, code=-9)], ["starting", "dead"]),
    "died, and was seen before": (
        [events.WorkerExited(time=2.4, rank=1, pid=11, code=-9), sample(2, 1, 1)],
        ["healthy", "dead"],
    ),
    "asked to end": (
        [
            events.Stopping(time=2, reason="SIGINT received", signal="SIGINT"),
            events.WorkerExited(time=3, rank=1, pid=11, code=-2),
            sample(3, 1, 1, state="X"),
        ],
        ["stopped", "stopped"],
    ),
    "one failed, the other was asked to end": (
        [
            sample(2, 1, 1, state="X"),  # dated a moment before it was made
            events.WorkerExited(time=2, rank=1, pid=11, code=-9),
            events.Stopping(time=2, reason="rank 1 was killed", signal="SIGTERM"),
            events.WorkerExited(time=3, rank=0, pid=10, code=-15),
            events.RunEnded(time=4, code=1, seconds=3),
        ],
        ["stopped", "dead"],
    ),
    "died, seen": ([sample(2, 1, 1, state="X")], ["dead", "dead"]),
    "died long ago": (
        [
            events.WorkerExited(time=2, rank=1, pid=11, code=-9),
            events.WorkerStarted(time=3, rank=1, pid=21),
            events.WorkerExited(time=3, rank=1, pid=11, code=-9),
        ],
        ["starting", "starting"],
    ),
    "died elsewhere, and is back": ([sample(2, 1, 1, state="X"), sample(3, 1, 1)], ["healthy", "healthy"]),
    "replaced elsewhere": (
        [sample(2, 1, 1), events.RankInfos(time=3, ranks=(RankInfo(rank=0, pid=10), RankInfo(rank=1, pid=77)))],
        ["healthy", "starting"],
    ),
    "a spare ends": (
        [
            events.WorkerStarted(time=2, rank=1, pid=50, spare=True),
            events.WorkerExited(time=3, rank=1, pid=50, code=-9),
        ],
        ["starting", "starting"],
    ),
    "a spare takes over": (
        [
            events.WorkerStarted(time=2, rank=2, pid=50, spare=True),
            events.WorkerExited(time=3, rank=1, pid=11, code=-9),
            events.RankChanged(time=3, rank=1, pid=50, previous_rank=2),
        ],
        ["starting", "starting"],
    ),
    "stuck": ([sample(19, 1, 1), STALL, VERDICT], ["healthy", "stuck"]),
    "stuck no more": ([sample(19, 1, 1), STALL, VERDICT, events.Resumed(time=21, seconds=5)], ["healthy", "healthy"]),
    "stuck and dead": ([STALL, VERDICT, events.WorkerExited(time=21, rank=1, pid=11, code=-9)], ["starting", "dead"]),
    "silent": ([sample(2, 1, 1, silent=9.0)], ["silent", "silent"]),
    "not in the sample": ([sample(2, 1, 1), sample(9, 8)], ["healthy", "silent"]),
    "debugged": ([sample(2, 1, 1, debugged=True)], ["debugged", "debugged"]),
    "slow": (
        [
            sample(2, 1, 1),
            events.StepTimingReport(
                time=3, ranks=(), slow=(events.SlowRank(rank=1, text="rank 1 (GPU 1) is 1.4 times slower"),)
            ),
        ],
        ["healthy", "slow"],
    ),
    "all is over": ([sample(2, 1, 1), events.RunEnded(time=3, code=0, seconds=3)], ["done", "done"]),
}


@pytest.mark.parametrize("name", HEALTHS)
def test_the_health_of_ranks(name: str) -> None:
    happened, health = HEALTHS[name]
    assert _health(*started(), *happened) == health


def test_who_does_nothing_but_wait_is_waiting() -> None:
    sample = RankSample(rank=0, step=3, phases="wwwwwwwwww", waiting=1.0)
    assert _health(events.ClusterSample(time=1, seconds=1, ranks=(sample,))) == ["waiting"]


def test_a_smaller_world_has_fewer_ranks_once_it_runs() -> None:
    two = tuple(RankInfo(rank=rank, node=rank, host=f"host{rank}", pid=10 + rank) for rank in range(2))
    model = told(*started(), events.RankInfos(time=2, ranks=two), sample(3, 1, 1), FAULT)
    assert (model.ranks.world_size, model.ranks.nodes, len(model.ranks)) == (2, 2, 2)
    model.apply(events.RankInfos(time=11, ranks=two[:1]))
    assert len(model.ranks) == 2, "the others may still come"
    model.apply(events.Recovered(time=12, generation=1, seconds=1.5, step=8))
    model.apply(sample(13, 9, generation=1))
    assert len(model.ranks) == 2, "they still may"
    model.apply(sample(14, 10, generation=1))
    assert (model.ranks.world_size, model.ranks.nodes, list(model.ranks), model.run.generation) == (1, 1, [0], 1)
    model.apply(events.RankInfos(time=15, ranks=two))
    assert (model.ranks.world_size, list(model.ranks)) == (2, [0, 1])


def test_a_step_that_goes_back_gives_no_negative_rate() -> None:
    model = told(*started(), *(sample(second, 10 * second, 10 * second) for second in range(2, 12)))
    assert model.progress.rate == pytest.approx(10)
    assert model.ranks[1].steps.rate == pytest.approx(10)
    model.apply(RESTART)
    model.apply(events.Restarted(time=12, seconds=1.6))
    model.apply(events.AttemptStarted(time=12, attempt=1))
    for second, step in enumerate((-1, 40, 42, 44), start=13):
        model.apply(sample(second, step, step))
        assert model.progress.rate >= 0
        assert model.ranks[0].steps.rate >= 0
    assert (model.progress.step, model.progress.rate, model.run.attempt) == (44, pytest.approx(2), 1)
    assert min(value for _, _, value in model.progress.curves["steps/s"].points) >= 0


@pytest.mark.parametrize(("every", "rate"), [(0.02, 50), (0.7, 1 / 0.7), (5, 0.2), (45, 1 / 45)])
def test_the_rate_is_steady_however_long_a_step_takes(every: float, rate: float) -> None:
    model = told(*started())
    rates = []
    for second in range(2, 400):
        model.apply(sample(second, int(second / every), int(second / every)))
        rates.append(model.progress.rate)
    assert all(0.7 * rate < one < 1.4 * rate for one in rates[-100:])


def test_the_rate_of_what_stands_still_goes_to_nothing() -> None:
    model = told(*started(), *(sample(second, second, second) for second in range(2, 30)))
    for second in range(30, 60):
        model.apply(sample(second, 29, 29))
    assert model.progress.rate < 0.05
    for second in range(60, 63):
        model.apply(sample(second, second - 30, second - 30))
    assert model.progress.rate == pytest.approx(1)


def test_what_is_left() -> None:
    model = told(*started(), *(sample(second, 2 * second, 2 * second) for second in range(2, 12)))
    assert model.progress.eta is None
    model.apply(events.MetricsMeasured(time=11, step=22, total=122, values={"loss": 0.5, "odd": None}, epoch=3))
    assert model.progress.eta == pytest.approx(50)
    assert (model.progress.epoch, model.progress.curves["loss"].points) == (3, [(22, 11, 0.5)])
    assert "odd" not in model.progress.curves


def test_of_a_script_whose_steps_nobody_sees_its_own_count() -> None:
    model = told(*started())
    for second in range(2, 12):
        model.apply(sample(second, -1, -1, phases="n" * 10))
        model.apply(events.MetricsMeasured(time=second + 0.5, step=3 * second, values={"loss": 1.0}))
    assert (model.progress.step, model.progress.rate) == (33, pytest.approx(3, rel=0.1))


def test_a_script_that_counts_anew_in_every_epoch_has_a_curve_over_what_was_seen() -> None:
    model = told(*started())
    for second in range(2, 42):
        model.apply(sample(second, second, second))
        model.apply(events.MetricsMeasured(time=second, step=second % 10, values={"loss": 1.0}))
    steps = [step for step, _, _ in model.progress.curves["loss"].points]
    assert steps[10:] == sorted(steps[10:])
    assert steps[-1] == 41


def test_samples_are_those_of_all_ranks_and_none_while_it_stands_still() -> None:
    model = told(*started(), sample(2, 1, 1, samples=60.0))
    assert model.progress.samples == 120
    model.apply(STALL)
    model.apply(sample(21, 1, 1, samples=60.0))
    assert (model.progress.samples, model.ranks[0].steps.samples) == (0, 0)


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    model = told(*started(), sample(9000, 1, 1), sample(9001, 2, 2), FAULT)
    for second in range(100, 110):
        model.apply(sample(second, second, second))
    assert (model.now, model.run.state, model.progress.rate) == (109, "running", pytest.approx(1))
    assert model.ranks[0].activity.strip.end == pytest.approx(109)
    assert model.stragglers.tally.seconds <= 10


# -- what it has cost

LOSSES = {
    "nothing": ([], 0.0),
    "regrouped": ([FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=9)], 0.6),
    "steps done again": (
        [FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=9, redone=4)],
        0.6 + 4 * 0.5,
    ),
    "restarted, until the next step": (
        [RESTART, events.Restarted(time=12, seconds=1.6), NOW, sample(14, -1, -1, phases="iii"), sample(15, 1, 1)],
        1.6 + 3,
    ),
    "stood still": ([STALL, VERDICT, events.Resumed(time=25, seconds=15)], 15.0),
    "stood still, seen before it is told": (
        [STALL, VERDICT, sample(24, 20, 20), sample(25, 21, 21), events.Resumed(time=25.2, seconds=15.2)],
        15.2,
    ),
    "stood still, and was killed": (
        [
            STALL,
            VERDICT,
            events.FaultEvent(time=22, rank=1, reason="rank 1 failed", recovery="regroup"),
            events.Recovered(time=23, generation=1, seconds=1, step=9),
        ],
        12.0 + 1.0,
    ),
    "hung, and was noticed late": (
        [
            events.FaultEvent(time=22, rank=1, reason="rank 1 failed", recovery="regroup", idle=12),
            events.Recovered(time=23, generation=1, seconds=1, step=9, idle=12),
        ],
        12.0 + 1.0,
    ),
    "hung, was diagnosed, and then replaced": (
        [
            STALL,
            VERDICT,
            events.FaultEvent(time=22, rank=1, reason="rank 1 failed", recovery="regroup", idle=12),
            events.Recovered(time=23, generation=1, seconds=1, step=9, idle=12),
            events.Resumed(time=23.2, seconds=13.2),
        ],
        12.0 + 1.0,
    ),
    "two faults at once": (
        [
            FAULT,
            events.FaultEvent(time=10.5, rank=0, reason="x", recovery="regroup"),
            events.Recovered(time=11, generation=2, seconds=0.6, step=9),
        ],
        0.6,
    ),
    "to the end": ([STALL, VERDICT, events.RunEnded(time=30, code=1, seconds=30)], 20.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_lost(name: str) -> None:
    happened, lost = LOSSES[name]
    model = told(*started(), *(sample(second, 2 * second, 2 * second) for second in range(2, 11)), *happened)
    assert model.lost == pytest.approx(lost)
    assert model.trouble.lost_time.seconds == pytest.approx(lost)
    model.apply(events.NoteEvent(time=102, text="later"))
    assert model.goodput == pytest.approx(1 - lost / 100), "of the time since the first step, at 2 s"


def test_at_the_end_all_views_show_what_the_console_says() -> None:
    happened, _ = LOSSES["hung, and was noticed late"]
    model = told(*started(), *(sample(second, 2 * second, 2 * second) for second in range(2, 11)), *happened)
    model.apply(events.GoodputMeasured(time=30, lost=14.0, seconds=56.0))
    model.apply(events.RunEnded(time=31, code=0, seconds=31))
    assert (model.lost, model.goodput) == (14.0, 0.75)


def test_what_lasts_counts_as_it_lasts() -> None:
    model = told(*started(), sample(2, 1, 1), STALL)
    assert model.lost == pytest.approx(10)
    model.apply(sample(25, 1, 1))
    assert (model.lost, model.trouble.lost_time.seconds) == (pytest.approx(15), 0)


# -- what is told


def test_the_story_is_told_once_and_in_words() -> None:
    note = "rank 1 failed: SIGKILL (Killed); regrouped, and step 74 was committed 0.07 s later, no step lost"
    failed = "rank 0 failed: ValueError: x"
    model = told(
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
    assert model.trouble.cause is not None
    assert model.trouble.cause.ranks == (0,)


def test_nodes_that_join_are_told() -> None:
    model = told(
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


@pytest.mark.parametrize(("slow", "also"), [(1, ""), (3, " (and 2 more)")])
def test_who_holds_the_others_up_is_told_now_and_then(slow: int, also: str) -> None:
    model = told(*started(8))
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
    assert model.ranks[0].health == "healthy", "what stands still is not slow"


def test_two_nodes_of_one_name() -> None:
    model = told(
        events.RendezvousProgress(time=0, expected=2, joined=("vm",), missing=("node 1",)),
        events.RendezvousProgress(time=5, expected=2, joined=("vm", "vm")),
    )
    assert [one.text for one in model.timeline.latest] == ["vm: 2 of 2 nodes joined"]


def test_verdicts_stand_until_it_goes_on() -> None:
    model = told(*started(), STALL, VERDICT)
    assert [one.text for one in model.trouble.verdicts] == [VERDICT.text]
    model.apply(events.Stalled(time=40, seconds=30))
    assert model.trouble.verdicts == [], "new ones follow"
    model.apply(VERDICT)
    model.apply(events.RunEnded(time=50, code=1, seconds=50))
    assert [one.text for one in model.trouble.verdicts] == [VERDICT.text], "nothing went on when it ended"


def test_who_is_stopped_at_once_has_not_died() -> None:
    """The last sample of a file stands at the beginning of its tenth of a second, before the signal."""
    model = told(*started(), sample(9, 5, 5), sample(10, 5, 5, state="X"))
    model.apply(events.Stopping(time=10.09, reason="SIGTERM received", signal="SIGTERM"))
    for rank in range(2):
        model.apply(events.WorkerExited(time=10.1, rank=rank, pid=10 + rank, code=-15))
    assert [view.health for view in model.ranks.values()] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    ("number", "code", "ending"), [("SIGINT", 130, "stopped by Ctrl-C"), ("SIGTERM", 143, "stopped by SIGTERM")]
)
def test_a_run_that_the_user_stops_has_not_failed(number: str, code: int, ending: str) -> None:
    """Not even if a rank raises because another one was faster to leave."""
    model = told(*started(), sample(9, 5, 5))
    model.apply(events.Stopping(time=10, reason=f"{number} received", signal=number))
    model.apply(events.WorkerExited(time=10.1, rank=1, pid=11, code=-15))
    model.apply(events.WorkerExited(time=10.2, rank=0, pid=10, code=1))
    model.apply(events.RunEnded(time=10.3, code=code, seconds=10))
    assert [view.health for view in model.ranks.values()] == ["stopped", "stopped"]
    assert (model.run.state, model.run.words) == ("stopped", ending)
    assert model.timeline.latest[-1].text == f"{ending}, after 10 s"


def test_a_worker_that_exits_with_the_code_of_a_signal_has_failed() -> None:
    model = told(*started(), sample(9, 5, 5), events.WorkerExited(time=10, rank=0, pid=10, code=130))
    model.apply(events.WorkerFailed(time=10.1, rank=0, summary="rank 0 failed: exit code 130", code=130))
    model.apply(events.RunEnded(time=10.3, code=130, seconds=10))
    assert (model.run.words, model.ranks[0].health) == ("failed (exit code 130)", "dead")


def test_the_rank_of_another_node_that_has_failed_was_not_stopped() -> None:
    """How it ended, nobody says but the fault."""
    model = told(*started(1), sample(9, 5, 5))
    model.apply(events.FaultEvent(time=9.5, rank=1, reason="rank 1 failed: exit code 3", recovery="stop"))
    model.apply(events.Stopping(time=9.5, reason="rank 1 failed: exit code 3", signal="SIGTERM"))
    model.apply(sample(10, 5, 5, state="X"))
    model.apply(events.RunEnded(time=10.2, code=3, seconds=10))
    assert [view.health for view in model.ranks.values()] == ["stopped", "dead"]


def test_a_process_has_one_rank() -> None:
    """Node 1 of three is lost, and the run ends right after."""
    infos = [RankInfo(rank=rank, node=rank, host=f"host{rank}", pid=7) for rank in range(3)]
    model = told(*started(1), events.RankInfos(time=2, ranks=tuple(infos)), sample(2, 1, 1, 1), FAULT)
    model.apply(events.RankInfos(time=11, ranks=(infos[0], RankInfo(rank=1, node=2, host="host2", pid=7))))
    assert (list(model.ranks), model.ranks.world_size) == ([0, 1], 2)


def test_steps_that_are_done_again_stand_where_they_are() -> None:
    model = told(*started(), sample(10, 50, 50), events.MetricsMeasured(time=10, step=50, values={"loss": 1.0}), FAULT)
    model.apply(events.Recovered(time=11, generation=1, seconds=0.6, step=41, redone=10))
    for step in (41, 43):
        model.apply(events.MetricsMeasured(time=11.1, step=step, values={"loss": 1.0}))
    assert [step for step, *_ in model.progress.curves["loss"].points] == [50, 41, 43]


# -- any order, any length


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_any_events_in_any_order(happened: list[Any]) -> None:
    model = RunModel()
    before: list[float] = [0.0] * 5
    for event in happened:
        model.apply(event)
        assert model.run.state in get_args(State)
        assert 0 <= model.goodput <= 1
        assert model.lost >= 0
        assert model.progress.rate >= 0
        assert model.progress.eta is None or model.progress.eta >= 0
        counts = [model.timeline.counts[kind] for kind in ("fault", "recovered", "restarted", "stalled")]
        assert all(now >= then for now, then in zip([*counts, model.trouble.lost_time.seconds], before, strict=True))
        before = [*counts, model.trouble.lost_time.seconds]
        assert {one.kind for one in model.timeline.latest} <= set(KINDS)
        for view in model.ranks.values():
            assert view.health in HEALTH
            assert view.steps.rate >= 0
        for histogram in model.ranks.times.values():
            assert all(count >= 0 for count in histogram.counts)


def test_days_stay_in_bounds() -> None:
    """What grows with time, grows fast here: each second has something of everything."""
    model = RunModel()
    for event in simulation.begin(4, now=0):
        model.apply(event)
    for second in range(2, 5000):
        model.apply(sample(second * 60.0, second, second, second, second, phases="w" * 700))
        model.apply(
            events.MetricsMeasured(time=second * 60.0, step=second, values={"loss": 1.0, f"made up {second}": 2.0})
        )
        model.apply(events.NoteEvent(time=second * 60.0, text=f"{second}"))
    assert len(model.timeline.latest) == 500
    assert len(model.progress.curves) == 100
    assert max(len(curve.points) for curve in model.progress.curves.values()) <= 2000
    assert all(len(view.activity.strip.letters) <= 6000 for view in model.ranks.values())
    assert len(model.stragglers.tally._parts) < 100


def test_a_sight_of_512_ranks_is_cheap() -> None:
    model = RunModel()
    took = []
    for event in simulation.run(512, 40):
        then = time.process_time()
        model.apply(event)
        took += [time.process_time() - then] if isinstance(event, events.ClusterSample) else []
    assert statistics.median(took) < 0.03, "2 ms on a machine that does nothing else"


def test_that_it_ends_makes_it_no_slower() -> None:
    model = told(*(sample(second, 10 * second, 10 * second, samples=5.0) for second in range(2, 12)))
    for second, state in ((12, "R"), (13, "E")):  # what ends is at nothing that can be seen
        model.apply(sample(second, 110, 110, state=state, phases="....", samples=-1.0))
    model.apply(events.RunEnded(time=14, code=0, seconds=13))
    assert [point[2] for point in model.progress.curves["steps/s"].points[-2:]] == pytest.approx([10, 10])
    assert (model.progress.rate, model.ranks[1].steps.rate, model.progress.samples) == (
        pytest.approx(10),
        pytest.approx(10),
        10.0,
    )
    assert (model.ranks[1].activity.shares.compute, model.ranks[1].activity.shares.waiting) == (0.5, 0.25)
