"""Distributed PyTorch training that starts, survives and explains itself."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.errors import PhalanxError, RankError
    from phalanx.launcher.api import launch
    from phalanx.launcher.job import Job
    from phalanx.launcher.spawn.spawn import spawn
    from phalanx.train.main import init, main
    from phalanx.train.run import Run
    from phalanx.worker.rendezvous.topology import Topology

__all__ = ["Job", "PhalanxError", "RankError", "Run", "__version__", "init", "launch", "main", "spawn", "topology"]

# Imported at first use: the launcher imports this package too, and must not wait for torch.
_WHERE = {
    "Job": "phalanx.launcher.job",
    "PhalanxError": "phalanx.errors",
    "RankError": "phalanx.errors",
    "Run": "phalanx.train.run",
    "init": "phalanx.train.main",
    "launch": "phalanx.launcher.api",
    "main": "phalanx.train.main",
    "spawn": "phalanx.launcher.spawn.spawn",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"phalanx has no {name}", name=name, obj=sys.modules[__name__])
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet: completion and "Did you mean" use them."""
    return __all__


def topology() -> Topology:
    """`phalanx.topology()`: return the node of this rank, the ranks on it, and the first rank of every node."""
    from phalanx.worker.rendezvous.topology import here

    return here()
