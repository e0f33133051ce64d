"""What `phalanx ui` asks for: the runs of this machine."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from phalanx.contract.run_metadata import RunMetadata
from phalanx.watch.html.comparison import ComparedRun
from phalanx.watch.source import Source

RunKind = Literal["running", "done", "stopped", "failed", "killed", "elsewhere"]


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list of runs of this machine. Flat, because it is a row of that table, as the page receives it."""

    key: str  # what a browser names it by
    name: str
    state: str  # as in `phalanx ps`
    kind: RunKind
    started: float
    ended: float | None
    ranks: int
    step: int | None
    loss: float | None  # None: none was measured, or it was not finite
    faults: int
    why: str  # it ended; empty: it succeeded, or it runs
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
        """Return where a viewer gets a run from."""
        ...

    def compared(self, key: str) -> ComparedRun:
        """Return a run, as it is compared with others."""
        ...

    def delete(self, key: str) -> None:
        """Delete a run that has ended, with its folder. Raises UsageError, LaunchError."""
        ...
