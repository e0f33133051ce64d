"""Copies the parts of each node to the next one, so that shards survive the loss of a node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from phalanx.train.snapshot.exchange import Exchange, Transfer
from phalanx.train.snapshot.reader import carry
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.snapshot_memory import SnapshotMemoryClient


class PartnerNodes:
    """The next node of each node, and the connections between them."""

    def __init__(self, group: WorkerProcessGroup, client: SnapshotMemoryClient) -> None:
        self._group = group
        self._client = client
        self._nodes = group.topology.nodes
        self._exchange: Exchange | None = None

    @property
    def exist(self) -> bool:
        """Whether there is more than one node."""
        return len(self._nodes) > 1

    def connect(self) -> Exchange:
        """Return the connections between nodes. All ranks create them together, on first use."""
        if self._exchange is None:
            self._exchange = Exchange(self._group.rank, self._group.membership.timeout)
        return self._exchange

    def transfers(self, turn: int) -> list[Transfer]:
        """Return which rank sends its part to which."""
        planned = []
        for node, ranks in enumerate(self._nodes):
            others = self._nodes[(node + 1) % len(self._nodes)]
            for place, rank in enumerate(ranks):
                planned.append(Transfer(f"{rank}.{turn}", rank, others[place % len(others)]))
        return planned

    def copies(self, turn: int) -> Callable[[], None]:
        """Connect, and return a function that copies the parts of all nodes when they are complete."""
        return partial(carry, self.connect(), self.transfers(turn), self._client)

    def close(self) -> None:
        """Cut the connections, so that no rank waits for one that has stopped."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
