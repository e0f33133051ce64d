"""Formats a diagnosis for people and for programs: verdicts, what all ranks do, how to see more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from phalanx.contract import encoding
from phalanx.diagnose import words
from phalanx.diagnose.description import being, described
from phalanx.diagnose.diagnosis import remarks
from phalanx.diagnose.evidence import Evidence, Frame
from phalanx.diagnose.rank_state import RankState, state_of
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import timed

MORE = "phalanx why --stacks shows all stacks; phalanx attach RANK opens a debugger in one"


class ReportPlace(msgspec.Struct, frozen=True):
    """Ranks at the same place."""

    ranks: tuple[int, ...]
    what: str  # all_reduce #214 at train.py:52
    place: Frame | None = None


def places(evidence: Evidence) -> list[ReportPlace]:
    """Return ranks by place, the smallest group first: a rank that is alone is the most interesting."""
    evidence = timed(evidence)
    together: dict[str, list[RankState]] = {}
    for rank in evidence.ranks:
        state = state_of(evidence, rank)
        together.setdefault(_what(state), []).append(state)
    found = [
        ReportPlace(tuple(sorted(each.number for each in group)), what, group[0].place)
        for what, group in together.items()
    ]
    return sorted(found, key=lambda place: (len(place.ranks), place.ranks))


def _what(state: RankState) -> str:
    rank, process = state.rank, state.rank.process
    if rank.ended is not None:
        return words.exit_text(rank.ended)
    if state.unseen:
        return rank.note or "does not respond"
    process_state = {"T": "stopped ", "t": "held by a tracer ", "Z": "dead "}.get(process.state if process else "", "")
    debugged = "in a debugger, " if rank.debugged else ""
    blank = state.call is None and not state.act.words and state.place is None
    doing = f"in {rank.phase}" if blank and process_state else rank.phase if blank else described(state)
    if process_state and not blank:
        doing = being(state)
    return f"{process_state}{debugged}{doing}"


def text(evidence: Evidence, verdicts: Sequence[Verdict], more: str = MORE) -> str:
    """Return the report: verdicts, remarks and what all ranks are doing."""
    lines: list[str] = []
    for verdict in verdicts:
        lines.append(verdict.text if verdict.certain else f"probably: {verdict.text}")
        lines += [f"  {detail}" for detail in verdict.details]
        if verdict.fix:
            lines.append(f"  fix: {verdict.fix}")
    notes = remarks(evidence)
    if not verdicts:
        lines.append(notes[0] if notes else "nothing wrong was found")
        notes = notes[1:]
    lines += notes
    if not evidence.ranks:
        return "no rank is running: ranks have not started yet, or have ended"
    still = f", {words.duration(evidence.waited)} without progress" if evidence.waited >= 1 else ""
    lines += ["", f"what all ranks are doing{still}:"]
    lines += [f"  {words.who(place.ranks)}: {place.what}" for place in places(evidence)]
    lines += [
        f"  rank {rank.rank}: {rank.note}" for rank in evidence.ranks if rank.note and (rank.threads or rank.calls)
    ][:8]
    if more:
        lines += ["", more]
    return "\n".join(lines)


def as_json(evidence: Evidence, verdicts: Sequence[Verdict]) -> bytes:
    """Return everything: verdicts, remarks, places and the evidence."""
    content: dict[str, Any] = {
        "verdicts": list(verdicts),
        "remarks": remarks(evidence),
        "places": places(evidence),
        "evidence": evidence,
    }
    return encoding.encode(content)
