"""Data for a report that the events of a run do not contain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StallEvidence:
    """A stall: its verdicts and the stacks of all ranks."""

    texts: tuple[str, ...]  # verdicts with their evidence
    stacks: str = ""


@dataclass(frozen=True)
class ReportTail:
    """The end of the output of a rank."""

    rank: int
    stream: str
    text: str
    whole: int  # bytes of the whole file


@dataclass(frozen=True)
class ReportContext:
    """Data for the report that the events of a run do not contain."""

    run: str
    state: str  # as in `phalanx ps`
    command: tuple[str, ...]
    version: str  # of phalanx
    made: float
    host: str = ""
    cwd: str = ""
    folder: str = ""
    started: float = 0.0
    first: str = ""  # the root cause in one line
    cause: str = ""  # the root cause in full
    stalls: tuple[StallEvidence, ...] = ()
    tails: tuple[ReportTail, ...] = ()
    with_logs: bool = True
