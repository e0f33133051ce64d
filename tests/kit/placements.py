"""Placements for tests. Default: all ranks on one node."""

from __future__ import annotations

from phalanx.cluster.cluster import Slot
from phalanx.cluster.placement import Seat
from phalanx.contract.ranks.placement import RankPlacement


def placement(
    rank: int,
    world_size: int,
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    node_rank: int = 0,
    node_count: int = 1,
) -> RankPlacement:
    """Return the placement of a rank."""
    return RankPlacement(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=world_size if local_world_size is None else local_world_size,
        node_rank=node_rank,
        node_count=node_count,
    )


def seat(rank: int = 0, world_size: int = 1, slot: Slot | None = None, *, local_rank: int | None = None) -> Seat:
    """Return the seat of a rank."""
    return Seat(placement(rank, world_size, local_rank=local_rank), slot or Slot())
