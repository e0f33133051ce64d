"""Assigns ranks to slots. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster.cluster import Cluster, Slot
from phalanx.contract.ranks.placement import RankPlacement


@dataclass(frozen=True)
class Seat:
    """The placement and the slot of one rank."""

    placement: RankPlacement
    slot: Slot

    @property
    def rank(self) -> int:
        """The rank, as in its placement."""
        return self.placement.rank

    @property
    def local_rank(self) -> int:
        """The local rank, as in its placement."""
        return self.placement.local_rank


def place(cluster: Cluster) -> tuple[Seat, ...]:
    """Assign ranks to the nodes in order, and on each node to its slots in order."""
    world_size = sum(len(node.slots) for node in cluster.nodes)
    seats: list[Seat] = []
    for node in cluster.nodes:
        for local_rank, slot in enumerate(node.slots):
            placement = RankPlacement(
                rank=len(seats),
                world_size=world_size,
                local_rank=local_rank,
                local_world_size=len(node.slots),
                node_rank=node.id,
                node_count=len(cluster.nodes),
            )
            seats.append(Seat(placement, slot))
    return tuple(seats)
