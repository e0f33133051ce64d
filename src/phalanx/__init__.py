"""Distributed PyTorch training that starts, survives and explains itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.join.topology import Topology

__all__ = ["__version__", "topology"]


def topology() -> Topology:
    """Where this rank stands: its node, the ranks beside it, the first rank of every node."""
    from phalanx.join.topology import here

    return here()
