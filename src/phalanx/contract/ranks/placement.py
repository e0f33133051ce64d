"""The placement of a rank: its number among all ranks and among those of its node, and the number of its node.

Messages contain these types. They are dataclasses, not msgspec structs: `phalanx run` places its ranks before it starts
the fork server, and importing msgspec would delay that.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 1 << 20  # per run: a message with a larger number is rejected
MAX_WORKERS = 1 << 10  # per node: more is a typing error, and would bring the host down
MAX_NODES = 1 << 14


class _Checked:
    """Checks the numbers of a placement. msgspec calls this after decoding, and raises ValidationError."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 <= value <= MAX_RANKS:
                raise ValueError(f"{name} is {value}, expected a number from 0 to {MAX_RANKS}")


@dataclass(frozen=True, kw_only=True)
class RankPlacement(_Checked):
    """The placement of one rank. The numbers of spare workers start at `world_size`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int


@dataclass(frozen=True, kw_only=True)
class PartialPlacement(_Checked):
    """The placement of a rank as far as a launcher or scheduler provides it. None: not provided."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    node_count: int | None = None
