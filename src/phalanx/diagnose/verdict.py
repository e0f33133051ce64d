"""Why a run is stalled: who, where, why, what shows it, what to do."""

from __future__ import annotations

import msgspec

from phalanx.diagnose.evidence import Frame


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run is stalled, and which ranks are to blame."""

    kind: str  # one word or two of the table in docs/concepts/hangs.md: "data", "stopped", "skipped collective" ...
    ranks: tuple[int, ...]  # who is wrong; empty: nobody, or all
    text: str  # one sentence that names rank, place and cause
    details: tuple[str, ...] = ()  # what shows it: one line each
    place: Frame | None = None  # of the culprit, in the user's code if that is there
    fix: str = ""  # what to type or to change
    certain: bool = True  # wrong whatever the time: a mismatch, a stopped process, a circle of waiting
