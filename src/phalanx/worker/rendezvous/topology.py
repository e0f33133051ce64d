"""Which ranks share a node, and groups of them: one per node, and one of the first rank of every node.

here = phalanx.topology()
dist.all_reduce(tensor, group=here.local_group())       # within the node
if here.local_rank == 0:
    dist.all_reduce(tensor, group=here.leader_group())  # between nodes
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.contract.ranks import topology as spelling
from phalanx.contract.variables import TOPOLOGY
from phalanx.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """The nodes of a run. `nodes`: the ranks of each node, by node rank."""

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def node_rank(self) -> int:
        """The number of this node."""
        return next(node for node, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The global ranks of this node."""
        return self.nodes[self.node_rank]

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return self.local_ranks.index(self.rank)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every node."""
        return tuple(ranks[0] for ranks in self.nodes)

    def local_group(self, **options: Any) -> Any:
        """Make a process group of this node's ranks. Every rank must call it, as with `new_group`."""
        import torch.distributed as dist

        groups = [dist.new_group(list(ranks), **options) for ranks in self.nodes]
        return groups[self.node_rank]

    def leader_group(self, **options: Any) -> Any:
        """Make a process group of the first rank of every node. Every rank must call it."""
        import torch.distributed as dist

        return dist.new_group(list(self.leaders), **options)


def read(environ: Mapping[str, str]) -> Topology:
    """Read the topology from `phalanx run`, or from any launcher that starts the same number of ranks on every node."""
    try:
        rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        text = environ.get(TOPOLOGY, "")
        nodes = spelling.decode(text) if text else _even(size, int(environ.get("LOCAL_WORLD_SIZE", str(size))))
    except ValueError as error:
        raise UsageError(f"the topology cannot be read from the environment: {error}") from None
    if sum(map(len, nodes)) != size or not 0 <= rank < size:
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={size} do not fit {TOPOLOGY}={text}",
            fix=f"unset {TOPOLOGY}: it is left over from another run",
        )
    return Topology(nodes, rank)


def here() -> Topology:
    """Return the topology of this process."""
    return read(os.environ)


def _even(size: int, local: int) -> tuple[tuple[int, ...], ...]:
    if local < 1 or size % local:
        raise ValueError(f"{size} ranks cannot be {local} on every node")
    return tuple(tuple(range(first, first + local)) for first in range(0, size, local))
