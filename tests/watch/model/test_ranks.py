"""The ranks of a run: their health, and how many there are."""

from __future__ import annotations

import pytest

from phalanx.contract import events
from phalanx.contract.events import NodeRanks, RankInfo, RankSample
from tests.watch.model.run_events import FAULT, STALL, VERDICT, AnyEvent, model_of, sample, started


def infos(when: float, *nodes: NodeRanks) -> events.RankInfos:
    return events.RankInfos(time=when, nodes=nodes)


def node(number: int, pid: int, rank: int) -> NodeRanks:
    """A node with one rank."""
    return NodeRanks(node=number, host=f"host{number}", ranks=(RankInfo(rank=rank, pid=pid),))


def health_of(*happened: AnyEvent) -> list[str]:
    return [view.health for _, view in sorted(model_of(*happened).ranks.items())]


HEALTHS = {
    "just started": ([], ["starting", "starting"]),
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
        [sample(2, 1, 1), infos(3, NodeRanks(ranks=(RankInfo(rank=0, pid=10), RankInfo(rank=1, pid=77))))],
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
def test_the_health_of_ranks_after_events(name: str) -> None:
    happened, health = HEALTHS[name]
    assert health_of(*started(), *happened) == health


def test_a_rank_that_only_waits_is_waiting() -> None:
    sample = RankSample(rank=0, step=3, phases="wwwwwwwwww", waiting=1.0)
    assert health_of(events.ClusterSample(time=1, seconds=1, ranks=(sample,))) == ["waiting"]


def test_a_smaller_world_has_fewer_ranks_once_it_runs() -> None:
    two = [node(rank, 10 + rank, rank) for rank in range(2)]
    model = model_of(*started(), infos(2, *two), sample(3, 1, 1), FAULT)
    assert (model.ranks.world_size, model.ranks.nodes, len(model.ranks)) == (2, 2, 2)
    model.apply(infos(11, two[0]))
    assert len(model.ranks) == 2, "the others may still come"
    model.apply(events.Recovered(time=12, generation=1, seconds=1.5, step=8))
    model.apply(sample(13, 9, generation=1))
    assert len(model.ranks) == 2, "they still may"
    model.apply(sample(14, 10, generation=1))
    assert (model.ranks.world_size, model.ranks.nodes, list(model.ranks), model.run.generation) == (1, 1, [0], 1)
    model.apply(infos(15, *two))
    assert (model.ranks.world_size, list(model.ranks)) == (2, [0, 1])


def test_a_rank_that_ends_at_once_on_a_signal_is_stopped() -> None:
    """The last sample is dated at the beginning of its tenth of a second, before the signal."""
    model = model_of(*started(), sample(9, 5, 5), sample(10, 5, 5, state="X"))
    model.apply(events.Stopping(time=10.09, reason="SIGTERM received", signal="SIGTERM"))
    for rank in range(2):
        model.apply(events.WorkerExited(time=10.1, rank=rank, pid=10 + rank, code=-15))
    assert [view.health for view in model.ranks.values()] == ["stopped", "stopped"]


def test_a_failed_rank_of_another_node_is_dead() -> None:
    """Only the fault says how it ended."""
    model = model_of(*started(1), sample(9, 5, 5))
    model.apply(events.FaultEvent(time=9.5, rank=1, reason="rank 1 failed: exit code 3", recovery="stop"))
    model.apply(events.Stopping(time=9.5, reason="rank 1 failed: exit code 3", signal="SIGTERM"))
    model.apply(sample(10, 5, 5, state="X"))
    model.apply(events.RunEnded(time=10.2, code=3, seconds=10))
    assert [view.health for view in model.ranks.values()] == ["stopped", "dead"]


def test_a_process_that_changes_its_rank_is_listed_once() -> None:
    """Node 1 of three is lost, and the run ends right after."""
    three = [node(rank, 7, rank) for rank in range(3)]
    model = model_of(*started(1), infos(2, *three), sample(2, 1, 1, 1), FAULT)
    model.apply(infos(11, three[0], node(2, 7, 1)))
    assert (list(model.ranks), model.ranks.world_size) == ([0, 1], 2)
