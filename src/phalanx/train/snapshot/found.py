"""What the nodes hold, all together -> the newest snapshot that is whole, and who has which part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from phalanx.train.snapshot.exchange import Transfer

RESCUE = 2  # the turn of what a rank has written alone, beside the two that all write in turn


class HeldPart(msgspec.Struct, frozen=True):
    """A sealed part in the memory of a node."""

    node: int  # or one of several on it, where each of its ranks has an agent of its own
    rank: int  # that wrote it
    turn: int
    step: int
    era: str
    together: tuple[int, ...]


@dataclass(frozen=True)
class Division:
    """Who writes a snapshot, as one rank sees it."""

    together: tuple[int, ...]  # the ranks whose parts are the whole
    writes: bool | None = None  # whether this one writes its shards; None: if it is in the first of all replicas
    whole_nodes: bool = False  # each node has all of it, and needs no copy elsewhere


def division(replicas: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], rank: int) -> Division:
    """Of a sharded state. Where each replica is on one node, and each node has one, every node writes all of it."""
    homes = [next((node for node in nodes if {*row} <= {*node}), None) for row in replicas]
    here = next(node for node in nodes if rank in node)
    if None in homes or not all(node in homes for node in nodes):
        return Division(tuple(sorted(rank for node in nodes for rank in node)))
    first = replicas[homes.index(here)]
    return Division(tuple(here), rank in first, len(nodes) > 1)


@dataclass(frozen=True)
class FoundSnapshot:
    step: int
    turn: int
    holders: Mapping[int, Sequence[int]]  # the rank that wrote a part -> nodes that have it
    wholes: Sequence[tuple[int, ...]]  # ranks whose parts are the whole: without sharding, those of any one node

    def whole_for(self, node: int) -> tuple[int, ...]:
        """One that is all on this node, if there is such a one."""
        near = (whole for whole in self.wholes if all(node in self.holders[rank] for rank in whole))
        return next(near, self.wholes[0])

    @property
    def next_turn(self) -> int:
        """Of the two that are written in turn, the one to be written next: not the one that this is in."""
        return int(self.turn == 0)

    def name(self, rank: int) -> str:
        return f"{rank}.{self.turn}"


def newest(held: Iterable[HeldPart]) -> FoundSnapshot | None:
    """Only parts of one step and one era belong together."""
    snapshots: dict[tuple[int, str, int], list[HeldPart]] = {}
    for one in held:
        snapshots.setdefault((one.step, one.era, one.turn), []).append(one)
    for (step, _, turn), parts in sorted(snapshots.items(), reverse=True):
        holders: dict[int, list[int]] = {}
        for part in sorted(parts, key=lambda part: part.node):
            holders.setdefault(part.rank, []).append(part.node)
        wholes = sorted({part.together for part in parts if set(part.together) <= set(holders)})
        if wholes:
            return FoundSnapshot(step, turn, holders, wholes)
    return None


def transfers(found: FoundSnapshot, needed: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> list[Transfer]:
    """So that each node has what its ranks need (`needed`, by rank): once a node, by turns of its ranks."""
    planned = []
    for node, ranks in enumerate(nodes):
        missing = sorted({part for rank in ranks for part in needed[rank] if node not in found.holders[part]})
        for place, part in enumerate(missing):
            source = nodes[found.holders[part][node % len(found.holders[part])]]
            sender, receiver = source[place % len(source)], ranks[place % len(ranks)]
            planned.append(Transfer(found.name(part), sender, receiver))
    return planned
