"""Whether workers can regroup."""

from __future__ import annotations

from collections.abc import Iterable
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


def combine(nodes: Iterable[Readiness]) -> Readiness:
    """Return the readiness of all nodes together.

    One script runs on all nodes: if some workers can regroup, those that have not connected yet can too.
    """
    nodes = list(nodes)
    return Readiness(
        any(node.connected for node in nodes),
        any(node.finished for node in nodes),
        all(node.all_connected for node in nodes),
    )
