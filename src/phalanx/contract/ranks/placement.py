"""Where a rank runs: its number among all ranks, among those of its node, and the number of its node."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_RANKS = 1 << 20  # of a run: a message with a larger number is refused
MAX_WORKERS = 1 << 10  # of a node: more is a typing error, and would bring the host down
MAX_NODES = 1 << 14

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]


class RankPlacement(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The placement of one rank. The numbers of spare workers start at `world_size`."""

    rank: Count
    world_size: Count
    local_rank: Count
    local_world_size: Count
    node_rank: Count
    node_count: Count


class PartialPlacement(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The placement of a rank as far as a launcher or scheduler gives it. None: not given."""

    rank: Count
    world_size: Count
    local_rank: Count | None = None
    local_world_size: Count | None = None
    node_rank: Count | None = None
    node_count: Count | None = None
