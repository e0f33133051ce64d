"""Decides which part of the state this rank writes to a snapshot.

Without sharding the ranks of a node divide the state. With sharding each rank writes its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.train.checkpoint.shares import Chunk, share
from phalanx.train.checkpoint.state import State
from phalanx.train.model import shard_placement
from phalanx.train.snapshot.found import Division, division


class StateDivision:
    """Divides the state among ranks. `nodes`: the ranks of each node."""

    def __init__(self, rank: int, local: tuple[int, ...], nodes: Sequence[Sequence[int]]) -> None:
        self._rank = rank
        self._nodes = nodes
        self._whole = Division(local)
        self._shards: Division | None = None  # known from the first sharded state on
        self._chunks: dict[str, Chunk] = {}  # of shards, by name
        self.sharded = False  # the last state was sharded

    def divide(self, kept: Mapping[str, object], found: State) -> tuple[Division, list[Chunk]]:
        """Return which ranks write this state together, and the part that this rank writes."""
        self.sharded = bool(found.sharded)
        if self.sharded and self._shards is None:
            self._shards = division(shard_placement.replicas(kept), self._nodes, self._rank)
        divided = self._shards if self.sharded and self._shards is not None else self._whole
        together = divided.together
        chunks = share(
            found.tensors,
            together.index(self._rank),
            len(together),
            frozenset(found.own),
            shards=divided.writes,
            known=self._chunks,
        )
        return divided, chunks
