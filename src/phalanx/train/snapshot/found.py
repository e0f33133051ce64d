"""Finds the newest complete snapshot among the parts that all nodes hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from phalanx.train.snapshot.exchange import Transfer

RESCUE = 2  # the turn of a snapshot that one rank has written alone; 0 and 1 are written by all ranks in turn


class HeldPart(msgspec.Struct, frozen=True):
    """A sealed part in the memory of a node."""

    node: int  # or the agent, if a scheduler has started one per rank
    rank: int  # of the writer
    turn: int
    step: int
    era: str
    together: tuple[int, ...]
    sharded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Division:
    """Which ranks write a snapshot together, for one of them."""

    together: tuple[int, ...]  # the ranks whose parts make a complete snapshot
    writes: bool | None = None  # whether this rank writes its shards; None: if it is in the first replica
    whole_nodes: bool = False  # each node has a complete snapshot, and needs no copy elsewhere


def division(replicas: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], rank: int) -> Division:
    """Return which ranks write a sharded state. If every node has a whole replica, every node writes all of it."""
    homes = [next((node for node in nodes if {*row} <= {*node}), None) for row in replicas]
    here = next(node for node in nodes if rank in node)
    if None in homes or not all(node in homes for node in nodes):
        return Division(tuple(sorted(rank for node in nodes for rank in node)))
    first = replicas[homes.index(here)]
    return Division(tuple(here), rank in first, len(nodes) > 1)


@dataclass(frozen=True)
class FoundSnapshot:
    """A complete snapshot, and which nodes hold its parts."""

    step: int
    turn: int
    holders: Mapping[int, Sequence[int]]  # writer of a part -> nodes that hold it
    wholes: Sequence[tuple[int, ...]]  # ranks whose parts are complete together: without sharding, those of any node
    sharded: tuple[str, ...] = ()  # names of the objects that are in shards

    def whole_for(self, node: int) -> tuple[int, ...]:
        """Return ranks whose parts are complete, all on this node if possible."""
        near = (whole for whole in self.wholes if all(node in self.holders[rank] for rank in whole))
        return next(near, self.wholes[0])

    @property
    def next_turn(self) -> int:
        """The turn to write next: not the one that this snapshot is in."""
        return int(self.turn == 0)

    def name(self, rank: int) -> str:
        """Return the name of a rank's part."""
        return f"{rank}.{self.turn}"


def newest(held: Iterable[HeldPart]) -> FoundSnapshot | None:
    """Return the newest complete snapshot. Only parts of one step and one era belong together."""
    snapshots: dict[tuple[int, str, int], list[HeldPart]] = {}
    for one in held:
        snapshots.setdefault((one.step, one.era, one.turn), []).append(one)
    for (step, _, turn), parts in sorted(snapshots.items(), reverse=True):
        holders: dict[int, list[int]] = {}
        for part in sorted(parts, key=lambda part: part.node):
            holders.setdefault(part.rank, []).append(part.node)
        wholes = sorted({part.together for part in parts if set(part.together) <= set(holders)})
        if wholes:
            return FoundSnapshot(step, turn, holders, wholes, parts[0].sharded)
    return None


def transfers(found: FoundSnapshot, needed: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> list[Transfer]:
    """Return the transfers after which each node has the parts that its ranks need (`needed`, by rank).

    A part is sent once per node; the ranks of a node take turns.
    """
    planned = []
    for node, ranks in enumerate(nodes):
        missing = sorted({part for rank in ranks for part in needed[rank] if node not in found.holders[part]})
        for place, part in enumerate(missing):
            source = nodes[found.holders[part][node % len(found.holders[part])]]
            sender, receiver = source[place % len(source)], ranks[place % len(ranks)]
            planned.append(Transfer(found.name(part), sender, receiver))
    return planned
