"""The runs of this machine, for `phalanx ui`."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from phalanx.contract.run_metadata import RunMetadata
from phalanx.watch.html.comparison import ComparedRun
from phalanx.watch.source import Source

RunKind = Literal["running", "done", "stopped", "failed", "killed", "elsewhere"]


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list of runs of this machine. Flat, because it is a row of that table, as the page receives it."""

    key: str  # identifies the run in requests of the browser
    name: str
    state: str  # as in `phalanx ps`
    kind: RunKind
    started: float
    ended: float | None
    ranks: int
    step: int | None
    loss: float | None  # None: none was measured, or it was not finite
    faults: int
    why: str  # why it ended; empty: it succeeded or is running
    command: str
    folder: str
    host: str
    deletable: bool
    metadata: RunMetadata | None = None


class RunList(Protocol):
    """All runs of this machine. A run is named by `RunEntry.key`; an unknown one raises UsageError."""

    def entries(self) -> list[RunEntry]:
        """Return all runs, the newest first."""
        ...

    def source(self, key: str) -> Source:
        """Return the source from which a viewer reads a run."""
        ...

    def compared(self, key: str) -> ComparedRun:
        """Return a run in the form used for comparison."""
        ...

    def delete(self, key: str) -> None:
        """Delete a run that has ended, with its folder. Raises UsageError, LaunchError."""
        ...
