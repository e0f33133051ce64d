"""Who goes where: a pure function from a Cluster to a seat for every rank."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster.cluster import Cluster, Slot


@dataclass(frozen=True)
class Seat:
    """One rank's place in the world."""

    rank: int
    node: int
    local_rank: int
    local_world_size: int
    slot: Slot


@dataclass(frozen=True)
class Placement:
    """The seats that are known here: all of them, or those of this node once everybody has joined."""

    seats: tuple[Seat, ...]
    world_size: int

    def on(self, node: int) -> tuple[Seat, ...]:
        """Return the seats of a node."""
        return tuple(seat for seat in self.seats if seat.node == node)


def place(cluster: Cluster) -> Placement:
    """Ranks run through the nodes in order, and through each node's slots in order."""
    seats: list[Seat] = []
    for node in cluster.nodes:
        for local_rank, slot in enumerate(node.slots):
            seats.append(Seat(len(seats), node.id, local_rank, len(node.slots), slot))
    return Placement(tuple(seats), len(seats))
