"""The other ranks, as far as checkpoints need them. A `Group` is one."""

from __future__ import annotations

from typing import Any, Protocol


class Peers(Protocol):
    """The whole surface: values are JSON-like. Called by the training loop's thread alone."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...
    def gather(self, obj: Any, *, all: bool = False) -> Any: ...  # noqa: A002  (a list of all ranks' values)


class SingleRank:
    """One process, no other ranks."""

    rank = 0
    world_size = 1

    def broadcast(self, obj: Any, src: int = 0) -> Any:  # noqa: ARG002
        return obj

    def gather(self, obj: Any, *, all: bool = False) -> Any:  # noqa: A002, ARG002
        return [obj]
