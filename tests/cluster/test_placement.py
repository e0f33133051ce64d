"""Ranks are assigned to nodes and slots in order."""

from __future__ import annotations

from phalanx.cluster.cluster import Cluster, Node, Slot
from phalanx.cluster.placement import place
from tests.kit.placements import placement


def test_ranks_run_through_uneven_nodes() -> None:
    slots = [Slot(cores=(core,)) for core in range(3)]
    cluster = Cluster((Node(0, "a", (slots[0],)), Node(1, "b", (slots[1], slots[2]))))
    seats = place(cluster)
    assert [seat.slot for seat in seats] == slots
    assert [seat.placement for seat in seats] == [
        placement(0, 3, local_rank=0, local_world_size=1, node_rank=0, node_count=2),
        placement(1, 3, local_rank=0, local_world_size=2, node_rank=1, node_count=2),
        placement(2, 3, local_rank=1, local_world_size=2, node_rank=1, node_count=2),
    ]
