"""Assigns ranks to slots. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster.cluster import Cluster, Slot


@dataclass(frozen=True)
class Seat:
    """The node, local rank and slot of one rank."""

    rank: int
    node: int
    local_rank: int
    local_world_size: int
    slot: Slot


@dataclass(frozen=True)
class Placement:
    """The known seats: all, or those of this node after the rendezvous."""

    seats: tuple[Seat, ...]
    world_size: int

    def on(self, node: int) -> tuple[Seat, ...]:
        """Return the seats of a node."""
        return tuple(seat for seat in self.seats if seat.node == node)


def place(cluster: Cluster) -> Placement:
    """Assign ranks to the nodes in order, and on each node to its slots in order."""
    seats: list[Seat] = []
    for node in cluster.nodes:
        for local_rank, slot in enumerate(node.slots):
            seats.append(Seat(len(seats), node.id, local_rank, len(node.slots), slot))
    return Placement(tuple(seats), len(seats))
