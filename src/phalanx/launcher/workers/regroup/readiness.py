"""Tracks whether workers can regroup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Readiness(NamedTuple):
    """Whether the workers of a node can regroup."""

    connected: bool = False  # a worker has connected, so the script can regroup
    finished: bool = False  # a worker has finished, so no new group can form
    all_connected: bool = False

    @property
    def can_regroup(self) -> bool:
        """Return whether a new group can form."""
        return self.connected and not self.finished


class ReadinessTable:
    """The readiness of the nodes of a run, by number.

    Counts the reports of nodes, so that `overall` does not scan all of them: with thousands of nodes it is called for
    every line of output.
    """

    def __init__(self, nodes: Iterable[tuple[int, Readiness]] = ()) -> None:
        self._nodes: dict[int, Readiness] = {}
        self._counts: Counter[Readiness] = Counter()  # there are eight different ones at most
        for node, readiness in nodes:
            self[node] = readiness

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __getitem__(self, node: int) -> Readiness:
        """Return the readiness of a node. For an unknown node it is empty."""
        return self._nodes.get(node, Readiness())

    def __setitem__(self, node: int, readiness: Readiness) -> None:
        self.remove(node)
        self._nodes[node] = readiness
        self._counts[readiness] += 1

    def remove(self, node: int) -> None:
        """Remove a node, if it exists."""
        before = self._nodes.pop(node, None)
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]

    @property
    def overall(self) -> Readiness:
        """Return the readiness of all nodes together.

        One script runs on all nodes: if some workers can regroup, those that have not connected yet can too.
        """
        return Readiness(
            any(node.connected for node in self._counts),
            any(node.finished for node in self._counts),
            all(node.all_connected for node in self._counts),
        )
