"""Which nodes each node tries to reach when a run stalls."""

from __future__ import annotations

import pytest

from phalanx.launcher.hangs.evidence_gatherer import ReachableNode, peers_to_reach


def test_in_a_small_run_every_node_tries_all() -> None:
    peers = [ReachableNode(rank, f"10.0.0.{rank}") for rank in range(3)]
    assert list(peers_to_reach(peers, 3)) == [peers] * 3
    assert list(peers_to_reach([], 3)) == []


@pytest.mark.parametrize("count", [5, 6, 100])
def test_in_a_large_run_every_node_tries_its_neighbours(count: int) -> None:
    """The request must not grow with the run, and every node is tried by some others."""
    peers = [ReachableNode(rank, "10.0.0.1") for rank in range(count)]
    asked = list(peers_to_reach(peers, 4))
    assert len(asked) == count
    for at, found in enumerate(asked):
        assert [peer.rank for peer in found] == [(at + turn) % count for turn in range(1, 5)]
