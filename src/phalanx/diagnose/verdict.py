"""A verdict: which ranks, where, why, the evidence, and a fix."""

from __future__ import annotations

import msgspec

from phalanx.diagnose.evidence import Frame


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run is stalled, and which ranks are to blame."""

    kind: str  # a kind from the table in docs/concepts/hangs.md: "data", "stopped", "skipped collective" ...
    ranks: tuple[int, ...]  # ranks to blame; empty: none, or all
    text: str  # one sentence with rank, place and cause
    details: tuple[str, ...] = ()  # the evidence: one line each
    place: Frame | None = None  # of the rank to blame, in user code if possible
    fix: str = ""  # what to type or to change
    # wrong no matter how much time passes: a mismatch, a stopped process, a cycle of waiting ranks
    certain: bool = True
