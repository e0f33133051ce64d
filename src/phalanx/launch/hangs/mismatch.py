"""What it means that ranks have called different things, from what each of them has told before it failed of that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from phalanx.diagnose.evidence import Evidence, Rank
from phalanx.diagnose.rank_state import survey
from phalanx.diagnose.rules import desync
from phalanx.diagnose.rules.divergence import divergences
from phalanx.launch.hangs import node_evidence
from phalanx.launch.hangs.source_lines import Sources

_LONG = 60.0  # seconds: nobody goes on from there


def words(told: Mapping[int, dict[str, Any]]) -> list[str]:
    """By rank. Empty: nothing that its error does not say."""
    try:
        sources = Sources()
        ranks = [_rank(number, told[number]) for number in sorted(told)]
        evidence = Evidence(
            time=time.time(), waited=_LONG, ranks=tuple(map(sources.annotated, ranks)), world_size=len(ranks)
        )
        field = survey(evidence)
        found = [desync.judge(field, divergence) for divergence in divergences(field)]
    except (msgspec.ValidationError, TypeError, ValueError, KeyError):
        return []
    return [line for verdict in found[:1] for line in (verdict.text, f"fix: {verdict.fix}")]


def _rank(number: int, message: dict[str, Any]) -> Rank:
    said = node_evidence.read(message)
    return Rank(
        rank=number,
        node=0,
        since=_LONG,
        phase="collective",
        threads=said.threads,
        groups=said.groups,
        calls=said.calls,
    )
