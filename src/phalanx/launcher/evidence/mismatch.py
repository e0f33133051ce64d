"""Explains a collective mismatch, from the reports of all ranks before they failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from phalanx.diagnose.evidence import Evidence, Rank
from phalanx.diagnose.rules.collectives import desync
from phalanx.diagnose.rules.collectives.divergence import divergences
from phalanx.diagnose.waits import survey
from phalanx.launcher.evidence import evidence_reply
from phalanx.launcher.evidence.source_lines import Sources

_LONG = 60.0  # seconds: long enough to count as stalled


def words(reports: Mapping[int, dict[str, Any]]) -> list[str]:
    """Return verdict and fix for the reports by rank. Empty if they add nothing to the error."""
    try:
        sources = Sources()
        ranks = [_rank(number, reports[number]) for number in sorted(reports)]
        evidence = Evidence(
            time=time.time(), waited=_LONG, ranks=tuple(map(sources.annotated, ranks)), world_size=len(ranks)
        )
        field = survey(evidence)
        found = [desync.judge(field, divergence) for divergence in divergences(field)]
    except (msgspec.ValidationError, TypeError, ValueError, KeyError):
        return []
    return [line for verdict in found[:1] for line in (verdict.text, f"fix: {verdict.fix}")]


def _rank(number: int, message: dict[str, Any]) -> Rank:
    reply = evidence_reply.read(message)
    return Rank(
        rank=number,
        node=0,
        since=_LONG,
        phase="collective",
        threads=reply.threads,
        groups=reply.groups,
        calls=reply.calls,
    )
