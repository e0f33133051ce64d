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
from phalanx.watch.model.rank import HEALTH
from phalanx.watch.model.run_model import KINDS, RunModel, State
from tests.watch.made import EVENTS

Any = events.AnyEvent


def started(ranks: int = 2) -> list[Any]:
    return [
        events.RunStarted(time=0, run="r", command=("train.py",), world_size=ranks, pid=9),
        events.AttemptStarted(time=1, attempt=0),
        *(events.WorkerBorn(time=1, rank=rank, pid=10 + rank) for rank in range(ranks)),
    ]


def sight(
    when: float, *steps: int, phases: str = "ddffbbwwoO", generation: int = 0, **more: object
) -> events.ClusterSample:
    glances = tuple(
        RankSample(rank=rank, step=step, phases=phases, compute=0.5, data=0.25, waiting=0.25, **more)  # type: ignore[arg-type]
        for rank, step in enumerate(steps)
    )
    return events.ClusterSample(time=when, seconds=1.0, generation=generation, ranks=glances)


def told(*happened: Any) -> RunModel:
    scene = RunModel()
    for event in happened:
        scene.see(event)
    return scene


FAULT = events.FaultEvent(time=10.4, rank=1, reason="rank 1 failed: SIGKILL (Killed)", recovery="regroup")
RESTART = events.FaultEvent(time=10.4, rank=1, reason="rank 1 failed: SIGKILL (Killed)", recovery="restart")
STALL = events.Stalled(time=20, seconds=10)
VERDICT = events.VerdictEvent(time=20, kind="data", text="rank 1 is in data loading", ranks=(1,))
NOW = events.AttemptStarted(time=12, attempt=1)

STATES = {
    "nothing": ([], "starting"),
    "gathering": ([events.RollCall(time=0, expected=2, here=("a",), missing=("b",))], "gathering"),
    "gathered": (
        [
            events.RollCall(time=0, expected=2, here=("a",), missing=("b",)),
            events.RollCall(time=0, expected=2, here=("a", "b")),
        ],
        "starting",
    ),
    "importing": ([*started(), sight(2, -1, -1, phases="iiiii")], "starting"),
    "joining": ([*started(), sight(2, -1, -1, phases="iijjj")], "starting"),
    "without steps": ([*started(), sight(2, -1, -1, phases="jjnnn")], "running"),
    "steps": ([*started(), sight(2, 1, 1)], "running"),
    "not to be seen yet": ([*started(), *(sight(n, -1, -1, phases="." * 10) for n in range(2, 6))], "starting"),
    "not to be seen": ([*started(), *(sight(n, -1, -1, phases="." * 10) for n in range(2, 8))], "running"),
    "measured": ([*started(), events.MetricsMeasured(time=3, step=1, values={})], "running"),
    "stalled": ([*started(), sight(10, 7, 7), STALL], "stalled"),
    "stalled, seen": ([*started(), sight(10, 7, 7), STALL, VERDICT, sight(21, 8, 8), sight(22, 8, 8)], "stalled"),
    "goes on": ([*started(), STALL, VERDICT, sight(21, 8, 8), sight(22, 9, 9)], "running"),
    "resumed": ([*started(), sight(2, 1, 1), STALL, VERDICT, events.Resumed(time=21, seconds=11)], "running"),
    "fault": ([*started(), sight(10, 7, 7), FAULT], "recovering"),
    "fault, and a sight from before": (
        [*started(), sight(9, 6, 6), FAULT, sight(10, 7, 7), sight(11, 8, 7)],
        "recovering",
    ),
    "went on": ([*started(), sight(9, 6, 6), FAULT, sight(11, 7, 7), sight(12, 8, 8)], "running"),
    "recovered": ([*started(), FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=8)], "running"),
    "restarting": ([*started(), RESTART, events.Stopping(time=10.5, reason="", signal="SIGTERM")], "recovering"),
    "restarted": ([*started(), sight(9, 6, 6), RESTART, events.Restarted(time=11, seconds=0.6), NOW], "starting"),
    "stopping": ([*started(), events.Stopping(time=2, reason="a signal", signal="SIGTERM")], "stopping"),
    "stopping, seen": (
        [
            *started(),
            sight(1, 1, 1),
            events.Stopping(time=2, reason="", signal="SIGTERM"),
            sight(3, 2, 2),
            sight(4, 3, 3),
        ],
        "stopping",
    ),
    "given up": ([*started(), events.FaultEvent(time=2, rank=0, reason="x", recovery="stop")], "stopping"),
    "preempted": ([*started(), events.Preempted(time=2, step=5, seconds=0.1)], "stopping"),
    "done": ([*started(), events.RunEnded(time=2, code=0, seconds=2), sight(3, 2, 2)], "done"),
    "failed": ([*started(), STALL, events.RunEnded(time=30, code=1, seconds=2), VERDICT], "failed"),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_the_run(name: str) -> None:
    happened, state = STATES[name]
    assert told(*happened).state == state


def _health(*happened: Any) -> list[str]:
    return [view.health for _, view in sorted(told(*happened).ranks.items())]


HEALTHS = {
    "born": ([], ["coming", "coming"]),
    "importing": ([sight(2, -1, -1, phases="iii")], ["coming", "coming"]),
    "well": ([sight(2, 1, 1)], ["well", "well"]),
    "ended": ([events.WorkerExited(time=2, rank=1, pid=11)], ["coming", "done"]),
    "ended, seen": ([sight(2, 1, 1, state="E")], ["done", "done"]),
    "died": ([events.WorkerExited(time=2, rank=1, pid=11, code=-9)], ["coming", "dead"]),
    "died, and was seen before": (
        [events.WorkerExited(time=2.4, rank=1, pid=11, code=-9), sight(2, 1, 1)],
        ["well", "dead"],
    ),
    "asked to end": (
        [
            events.Stopping(time=2, reason="SIGINT received", signal="SIGINT"),
            events.WorkerExited(time=3, rank=1, pid=11, code=-2),
            sight(3, 1, 1, state="X"),
        ],
        ["stopped", "stopped"],
    ),
    "one failed, the other was asked to end": (
        [
            sight(2, 1, 1, state="X"),  # dated a moment before it was made
            events.WorkerExited(time=2, rank=1, pid=11, code=-9),
            events.Stopping(time=2, reason="rank 1 was killed", signal="SIGTERM"),
            events.WorkerExited(time=3, rank=0, pid=10, code=-15),
            events.RunEnded(time=4, code=1, seconds=3),
        ],
        ["stopped", "dead"],
    ),
    "died, seen": ([sight(2, 1, 1, state="X")], ["dead", "dead"]),
    "died long ago": (
        [
            events.WorkerExited(time=2, rank=1, pid=11, code=-9),
            events.WorkerBorn(time=3, rank=1, pid=21),
            events.WorkerExited(time=3, rank=1, pid=11, code=-9),
        ],
        ["coming", "coming"],
    ),
    "died elsewhere, and is back": ([sight(2, 1, 1, state="X"), sight(3, 1, 1)], ["well", "well"]),
    "replaced elsewhere": (
        [sight(2, 1, 1), events.RankInfos(time=3, ranks=(RankInfo(rank=0, pid=10), RankInfo(rank=1, pid=77)))],
        ["well", "coming"],
    ),
    "a spare ends": (
        [events.WorkerBorn(time=2, rank=1, pid=50, spare=True), events.WorkerExited(time=3, rank=1, pid=50, code=-9)],
        ["coming", "coming"],
    ),
    "a spare takes over": (
        [
            events.WorkerBorn(time=2, rank=2, pid=50, spare=True),
            events.WorkerExited(time=3, rank=1, pid=11, code=-9),
            events.WorkerSeated(time=3, rank=1, pid=50, was=2),
        ],
        ["coming", "coming"],
    ),
    "stuck": ([sight(19, 1, 1), STALL, VERDICT], ["well", "stuck"]),
    "stuck no more": ([sight(19, 1, 1), STALL, VERDICT, events.Resumed(time=21, seconds=5)], ["well", "well"]),
    "stuck and dead": ([STALL, VERDICT, events.WorkerExited(time=21, rank=1, pid=11, code=-9)], ["coming", "dead"]),
    "silent": ([sight(2, 1, 1, silent=9.0)], ["silent", "silent"]),
    "not in the sight": ([sight(2, 1, 1), sight(9, 8)], ["well", "silent"]),
    "debugged": ([sight(2, 1, 1, debugged=True)], ["debugged", "debugged"]),
    "slow": (
        [sight(2, 1, 1), events.StepTimingReport(time=3, ranks=(), late=("rank 1 (GPU 1) is 1.4 times slower",))],
        ["well", "slow"],
    ),
    "all is over": ([sight(2, 1, 1), events.RunEnded(time=3, code=0, seconds=3)], ["done", "done"]),
}


@pytest.mark.parametrize("name", HEALTHS)
def test_the_health_of_ranks(name: str) -> None:
    happened, health = HEALTHS[name]
    assert _health(*started(), *happened) == health


def test_who_does_nothing_but_wait_is_waiting() -> None:
    glance = RankSample(rank=0, step=3, phases="wwwwwwwwww", waiting=1.0)
    assert _health(events.ClusterSample(time=1, seconds=1, ranks=(glance,))) == ["waiting"]


def test_a_smaller_world_has_fewer_ranks_once_it_runs() -> None:
    two = tuple(RankInfo(rank=rank, node=rank, host=f"host{rank}", pid=10 + rank) for rank in range(2))
    scene = told(*started(), events.RankInfos(time=2, ranks=two), sight(3, 1, 1), FAULT)
    assert (scene.world_size, scene.nodes, len(scene.ranks)) == (2, 2, 2)
    scene.see(events.RankInfos(time=11, ranks=two[:1]))
    assert len(scene.ranks) == 2, "the others may still come"
    scene.see(events.Recovered(time=12, generation=1, seconds=1.5, step=8))
    scene.see(sight(13, 9, generation=1))
    assert len(scene.ranks) == 2, "they still may"
    scene.see(sight(14, 10, generation=1))
    assert (scene.world_size, scene.nodes, list(scene.ranks), scene.generation) == (1, 1, [0], 1)
    scene.see(events.RankInfos(time=15, ranks=two))
    assert (scene.world_size, list(scene.ranks)) == (2, [0, 1])


def test_a_step_that_goes_back_gives_no_negative_rate() -> None:
    scene = told(*started(), *(sight(second, 10 * second, 10 * second) for second in range(2, 12)))
    assert scene.rate == pytest.approx(10)
    assert scene.ranks[1].rate == pytest.approx(10)
    scene.see(RESTART)
    scene.see(events.Restarted(time=12, seconds=1.6))
    scene.see(events.AttemptStarted(time=12, attempt=1))
    for second, step in enumerate((-1, 40, 42, 44), start=13):
        scene.see(sight(second, step, step))
        assert scene.rate >= 0
        assert scene.ranks[0].rate >= 0
    assert (scene.step, scene.rate, scene.attempt) == (44, pytest.approx(2), 1)
    assert min(value for _, _, value in scene.curves["steps/s"].points) >= 0


@pytest.mark.parametrize(("every", "rate"), [(0.02, 50), (0.7, 1 / 0.7), (5, 0.2), (45, 1 / 45)])
def test_the_rate_is_steady_however_long_a_step_takes(every: float, rate: float) -> None:
    scene = told(*started())
    rates = []
    for second in range(2, 400):
        scene.see(sight(second, int(second / every), int(second / every)))
        rates.append(scene.rate)
    assert all(0.7 * rate < one < 1.4 * rate for one in rates[-100:])


def test_the_rate_of_what_stands_still_goes_to_nothing() -> None:
    scene = told(*started(), *(sight(second, second, second) for second in range(2, 30)))
    for second in range(30, 60):
        scene.see(sight(second, 29, 29))
    assert scene.rate < 0.05
    for second in range(60, 63):
        scene.see(sight(second, second - 30, second - 30))
    assert scene.rate == pytest.approx(1)


def test_what_is_left() -> None:
    scene = told(*started(), *(sight(second, 2 * second, 2 * second) for second in range(2, 12)))
    assert scene.left is None
    scene.see(events.MetricsMeasured(time=11, step=22, total=122, values={"loss": 0.5, "odd": None}, epoch=3))
    assert scene.left == pytest.approx(50)
    assert (scene.epoch, scene.curves["loss"].points) == (3, [(22, 11, 0.5)])
    assert "odd" not in scene.curves


def test_of_a_script_whose_steps_nobody_sees_its_own_count() -> None:
    scene = told(*started())
    for second in range(2, 12):
        scene.see(sight(second, -1, -1, phases="n" * 10))
        scene.see(events.MetricsMeasured(time=second + 0.5, step=3 * second, values={"loss": 1.0}))
    assert (scene.step, scene.rate) == (33, pytest.approx(3, rel=0.1))


def test_a_script_that_counts_anew_in_every_epoch_has_a_curve_over_what_was_seen() -> None:
    scene = told(*started())
    for second in range(2, 42):
        scene.see(sight(second, second, second))
        scene.see(events.MetricsMeasured(time=second, step=second % 10, values={"loss": 1.0}))
    steps = [step for step, _, _ in scene.curves["loss"].points]
    assert steps[10:] == sorted(steps[10:])
    assert steps[-1] == 41


def test_samples_are_those_of_all_ranks_and_none_while_it_stands_still() -> None:
    scene = told(*started(), sight(2, 1, 1, samples=60.0))
    assert scene.samples == 120
    scene.see(STALL)
    scene.see(sight(21, 1, 1, samples=60.0))
    assert (scene.samples, scene.ranks[0].samples) == (0, 0)


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    scene = told(*started(), sight(9000, 1, 1), sight(9001, 2, 2), FAULT)
    for second in range(100, 110):
        scene.see(sight(second, second, second))
    assert (scene.now, scene.state, scene.rate) == (109, "running", pytest.approx(1))
    assert scene.ranks[0].strip.end == pytest.approx(109)
    assert scene.tally.seconds <= 10


# -- what it has cost

LOSSES = {
    "nothing": ([], 0.0),
    "regrouped": ([FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=9)], 0.6),
    "steps done again": (
        [FAULT, events.Recovered(time=11, generation=1, seconds=0.6, step=9, redone=4)],
        0.6 + 4 * 0.5,
    ),
    "restarted, until the next step": (
        [RESTART, events.Restarted(time=12, seconds=1.6), NOW, sight(14, -1, -1, phases="iii"), sight(15, 1, 1)],
        1.6 + 3,
    ),
    "stood still": ([STALL, VERDICT, events.Resumed(time=25, seconds=15)], 15.0),
    "stood still, seen before it is told": (
        [STALL, VERDICT, sight(24, 20, 20), sight(25, 21, 21), events.Resumed(time=25.2, seconds=15.2)],
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
    scene = told(*started(), *(sight(second, 2 * second, 2 * second) for second in range(2, 11)), *happened)
    assert scene.lost == pytest.approx(lost)
    assert scene.losses.seconds == pytest.approx(lost)
    scene.see(events.Note(time=102, text="later"))
    assert scene.goodput == pytest.approx(1 - lost / 100), "of the time since the first step, at 2 s"


def test_what_lasts_counts_as_it_lasts() -> None:
    scene = told(*started(), sight(2, 1, 1), STALL)
    assert scene.lost == pytest.approx(10)
    scene.see(sight(25, 1, 1))
    assert (scene.lost, scene.losses.seconds) == (pytest.approx(15), 0)


# -- what is told


def test_the_story_is_told_once_and_in_words() -> None:
    note = "rank 1 failed: SIGKILL (Killed); regrouped, and step 74 was committed 0.07 s later, no step lost"
    failed = "rank 0 failed: ValueError: x"
    scene = told(
        *started(),
        events.Note(time=2, text="chaos"),
        events.Note(time=3, text="chaos"),
        FAULT,
        events.Recovered(time=11, generation=1, seconds=0.067, step=74, redone=1),
        events.Note(time=11, text=note, repeats=True),
        events.FaultEvent(time=12, rank=0, reason=failed, recovery="stop"),
        events.Stopping(time=12, reason=failed, signal="SIGTERM"),
        events.WorkerFailed(time=13, rank=0, summary=failed, code=1),
        events.RunEnded(time=14, code=1, seconds=14),
    )
    assert [(one.kind, one.text) for one in scene.happenings] == [
        ("note", "chaos"),
        ("fault", "rank 1 failed: SIGKILL (Killed)"),
        ("recovered", "recovered in 0.07 s: step 74 is committed, 1 step done again"),
        ("fault", failed),
        ("end", "ended with code 1, after 14 s"),
    ]
    assert scene.cause is not None
    assert scene.cause.ranks == (0,)


def test_nodes_that_join_are_told() -> None:
    scene = told(
        events.RollCall(time=0, expected=3, here=("a",), missing=("b", "c")),
        events.RollCall(time=5, expected=3, here=("a", "c"), missing=("b",)),
    )
    scene.see(events.Note(time=6, text="2 of 3 nodes are here, waiting for b (3 s)", repeats=True))
    assert scene.roll is not None
    assert scene.roll.missing == ("b",)
    scene.see(events.RollCall(time=9, expected=3, here=("a", "b", "c")))
    assert scene.roll is None
    scene.see(events.FaultEvent(time=20, rank=0, reason="d joined", recovery="regroup", joins=True))
    assert scene.state == "recovering"
    assert [(one.kind, one.text) for one in scene.happenings] == [
        ("joined", "c: 2 of 3 nodes are here"),
        ("joined", "b: 3 of 3 nodes are here"),
        ("joined", "d joined"),
    ]


@pytest.mark.parametrize(("slow", "also"), [(1, ""), (3, ", and 2 more did")])
def test_who_holds_the_others_up_is_told_now_and_then(slow: int, also: str) -> None:
    scene = told(*started(8))
    for second in range(2, 700):
        glances = tuple(
            RankSample(rank=rank, step=second, phases="dddwwwfffO" if rank < slow else "wwwwwwfffO")
            for rank in range(8)
        )
        scene.see(events.ClusterSample(time=second, seconds=1.0, ranks=glances))
    expected = "rank 0 kept the others waiting 30% of the last {}, mostly in data loading" + also
    assert [one.text for one in scene.happenings] == [expected.format("20 s"), expected.format("minute")]
    assert [scene.ranks[rank].health for rank in range(4)] == ["slow"] * slow + ["well"] * (4 - slow)
    scene.see(STALL)
    assert scene.ranks[0].health == "well", "what stands still is not slow"


def test_two_nodes_of_one_name() -> None:
    scene = told(
        events.RollCall(time=0, expected=2, here=("vm",), missing=("node 1",)),
        events.RollCall(time=5, expected=2, here=("vm", "vm")),
    )
    assert [one.text for one in scene.happenings] == ["vm: 2 of 2 nodes are here"]


def test_verdicts_stand_until_it_goes_on() -> None:
    scene = told(*started(), STALL, VERDICT)
    assert [one.text for one in scene.verdicts] == [VERDICT.text]
    scene.see(events.Stalled(time=40, seconds=30))
    assert scene.verdicts == [], "new ones follow"
    scene.see(VERDICT)
    scene.see(events.RunEnded(time=50, code=1, seconds=50))
    assert [one.text for one in scene.verdicts] == [VERDICT.text], "nothing went on when it ended"


def test_who_is_stopped_at_once_has_not_died() -> None:
    """The last sight of a file stands at the beginning of its tenth of a second, before the signal."""
    scene = told(*started(), sight(9, 5, 5), sight(10, 5, 5, state="X"))
    scene.see(events.Stopping(time=10.09, reason="SIGTERM received", signal="SIGTERM"))
    for rank in range(2):
        scene.see(events.WorkerExited(time=10.1, rank=rank, pid=10 + rank, code=-15))
    assert [view.health for view in scene.ranks.values()] == ["stopped", "stopped"]


def test_the_rank_of_another_node_that_has_failed_was_not_stopped() -> None:
    """How it ended, nobody says but the fault."""
    scene = told(*started(1), sight(9, 5, 5))
    scene.see(events.FaultEvent(time=9.5, rank=1, reason="rank 1 failed: exit code 3", recovery="stop"))
    scene.see(events.Stopping(time=9.5, reason="rank 1 failed: exit code 3", signal="SIGTERM"))
    scene.see(sight(10, 5, 5, state="X"))
    scene.see(events.RunEnded(time=10.2, code=3, seconds=10))
    assert [view.health for view in scene.ranks.values()] == ["stopped", "dead"]


def test_a_process_has_one_rank() -> None:
    """Node 1 of three is lost, and the run ends right after."""
    faces = [RankInfo(rank=rank, node=rank, host=f"host{rank}", pid=7) for rank in range(3)]
    scene = told(*started(1), events.RankInfos(time=2, ranks=tuple(faces)), sight(2, 1, 1, 1), FAULT)
    scene.see(events.RankInfos(time=11, ranks=(faces[0], RankInfo(rank=1, node=2, host="host2", pid=7))))
    assert (list(scene.ranks), scene.world_size) == ([0, 1], 2)


def test_steps_that_are_done_again_stand_where_they_are() -> None:
    scene = told(*started(), sight(10, 50, 50), events.MetricsMeasured(time=10, step=50, values={"loss": 1.0}), FAULT)
    scene.see(events.Recovered(time=11, generation=1, seconds=0.6, step=41, redone=10))
    for step in (41, 43):
        scene.see(events.MetricsMeasured(time=11.1, step=step, values={"loss": 1.0}))
    assert [step for step, *_ in scene.curves["loss"].points] == [50, 41, 43]


# -- any order, any length


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_any_events_in_any_order(happened: list[Any]) -> None:
    scene = RunModel()
    before: list[float] = [0.0] * 5
    for event in happened:
        scene.see(event)
        assert scene.state in get_args(State)
        assert 0 <= scene.goodput <= 1
        assert scene.lost >= 0
        assert scene.rate >= 0
        assert scene.left is None or scene.left >= 0
        counts = [scene.story.counts[kind] for kind in ("fault", "recovered", "restarted", "stalled")]
        assert all(now >= then for now, then in zip([*counts, scene.losses.seconds], before, strict=True))
        before = [*counts, scene.losses.seconds]
        assert {one.kind for one in scene.happenings} <= set(KINDS)
        for view in scene.ranks.values():
            assert view.health in HEALTH
            assert view.rate >= 0
        for histogram in scene.times.values():
            assert all(count >= 0 for count in histogram.counts)


def test_days_stay_in_bounds() -> None:
    """What grows with time, grows fast here: each second has something of everything."""
    scene = RunModel()
    for event in simulation.begin(4, now=0):
        scene.see(event)
    for second in range(2, 5000):
        scene.see(sight(second * 60.0, second, second, second, second, phases="w" * 700))
        scene.see(
            events.MetricsMeasured(time=second * 60.0, step=second, values={"loss": 1.0, f"made up {second}": 2.0})
        )
        scene.see(events.Note(time=second * 60.0, text=f"{second}"))
    assert len(scene.happenings) == 500
    assert len(scene.curves) == 100
    assert max(len(curve.points) for curve in scene.curves.values()) <= 2000
    assert all(len(view.strip.letters) <= 6000 for view in scene.ranks.values())
    assert len(scene.tally._parts) < 100


def test_a_sight_of_512_ranks_is_cheap() -> None:
    scene = RunModel()
    took = []
    for event in simulation.run(512, 40):
        then = time.process_time()
        scene.see(event)
        took += [time.process_time() - then] if isinstance(event, events.ClusterSample) else []
    assert statistics.median(took) < 0.03, "2 ms on a machine that does nothing else"


def test_that_it_ends_makes_it_no_slower() -> None:
    scene = told(*(sight(second, 10 * second, 10 * second, samples=5.0) for second in range(2, 12)))
    for second, state in ((12, "R"), (13, "E")):  # what ends is at nothing that can be seen
        scene.see(sight(second, 110, 110, state=state, phases="....", samples=-1.0))
    scene.see(events.RunEnded(time=14, code=0, seconds=13))
    assert [point[2] for point in scene.curves["steps/s"].points[-2:]] == pytest.approx([10, 10])
    assert (scene.rate, scene.ranks[1].rate, scene.samples) == (pytest.approx(10), pytest.approx(10), 10.0)
    assert (scene.ranks[1].compute, scene.ranks[1].waiting) == (0.5, 0.25)
