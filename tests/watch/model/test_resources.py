"""Curves of what the ranks use."""

from __future__ import annotations

from phalanx.contract.events import ClusterSample, RankSample
from phalanx.watch.model.series.resources import CPU, GPU, GPU_MEMORY, MEMORY, Resources

GIB = 1 << 30


def test_resources_of_all_ranks_are_added() -> None:
    resources = Resources()
    ranks = (
        RankSample(rank=0, cpu=1.5, memory=2 * GIB, gpu=0.5, gpu_memory=8 * GIB),
        RankSample(rank=1, cpu=0.5, memory=1 * GIB, gpu=1.0, gpu_memory=9 * GIB),
        RankSample(rank=2, state="X"),
    )
    resources.sampled(ClusterSample(time=5.0, seconds=1.0, ranks=ranks), 7)
    assert {name: curve.points for name, curve in resources.curves.items()} == {
        CPU: [(7, 5.0, 2.0)],
        MEMORY: [(7, 5.0, 3.0)],
        GPU: [(7, 5.0, 75.0)],
        GPU_MEMORY: [(7, 5.0, 9.0)],
    }


def test_unknown_resources_have_no_curve() -> None:
    """Without a GPU; before the first rate; after the last process."""
    resources = Resources()
    for when, rank in enumerate((RankSample(rank=0, memory=GIB), RankSample(rank=0, state="E"))):
        resources.sampled(ClusterSample(time=float(when), seconds=1.0, ranks=(rank,)), -1)
    assert {name: curve.points for name, curve in resources.curves.items()} == {MEMORY: [(0, 0.0, 1.0)]}
