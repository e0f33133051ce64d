"""The other ranks, as far as checkpoints need them. A `WorkerProcessGroup` implements this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from phalanx.errors import CheckpointError

T = TypeVar("T")


class Broadcaster(Protocol):
    """All ranks that write one file together."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        ...


class Peers(Broadcaster, Protocol):
    """All ranks that save together. Values are JSON-like; only the training thread calls it."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    def gather(self, obj: Any, *, all: bool = False) -> Any:  # noqa: A002
        """Return the objects of all ranks."""
        ...


class SingleRank:
    """One process, no other ranks."""

    rank = 0
    world_size = 1

    def broadcast(self, obj: Any, src: int = 0) -> Any:  # noqa: ARG002
        """Return the object."""
        return obj

    def gather(self, obj: Any, *, all: bool = False) -> Any:  # noqa: A002, ARG002
        """Return the object in a list."""
        return [obj]


def by_main(peers: Peers, call: Callable[[], T]) -> T:
    """Call on rank 0; return the result, or raise its error, on every rank."""
    outcome: dict[str, Any] = {}
    if peers.rank == 0:
        try:
            outcome = {"got": call()}
        except CheckpointError as error:
            outcome = {"what": error.what, "fix": error.fix}
    outcome = peers.broadcast(outcome)
    if "what" in outcome:
        raise CheckpointError(outcome["what"], fix=outcome["fix"])
    return outcome["got"]  # type: ignore[no-any-return]
