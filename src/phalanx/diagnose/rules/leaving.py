"""Ranks that have ended, or are about to, while others still wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.diagnose import words
from phalanx.diagnose.description import described
from phalanx.diagnose.rank_state import RankState
from phalanx.diagnose.rules.collectives import desync
from phalanx.diagnose.rules.collectives.divergence import guard
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph


def verdict(graph: WaitGraph, left: Sequence[RankState]) -> Verdict | None:
    """Return a verdict for ranks that have left in the same way."""
    state, ranks = left[0], tuple(each.number for each in left)
    waiting = graph.of(graph.waiting_for(ranks))
    first = next((each for each in waiting if each.call is not None), None)
    if first is None or first.call is None or first.call.op in ("send", "recv"):
        return None
    others = tuple(each.number for each in waiting)
    who, them = words.who(ranks), words.others(others, graph.evidence, ranks)
    asked = guard(first, first.call)
    if asked is not None and len(others) < len(ranks):
        return Verdict(
            kind="skipped collective",
            ranks=others,
            text=f"{words.who(others)} called one more collective than the others, {words.numbered(first.call)}"
            f"{words.inside(asked)}; {who} {_whither(state, ranks)}",
            place=asked,
            fix=desync.SAME,
        )
    if asked is not None:
        return Verdict(
            kind="skipped collective",
            ranks=ranks,
            text=f"{who} skipped a collective that {them} called{words.inside(asked)}: {words.numbered(first.call)}; "
            f"{who} {_whither(state, ranks)}",
            place=asked,
            fix=desync.SAME,
        )
    counted = [each for each in (state, first) if each.rank.step >= 0]
    return Verdict(
        kind="uneven data",
        ranks=ranks,
        text=f"{who} left the loop earlier than the others and {_whither(state, ranks)}, while {them} still "
        f"{words.verb(others, 'waits', 'wait')} in {described(first)}: uneven data",
        place=state.place,
        details=tuple(f"rank {each.number}: {each.rank.step} steps" for each in counted),
        fix=desync.UNEVEN,
    )


def _whither(state: RankState, ranks: Sequence[int]) -> str:
    if state.rank.ended is not None:
        return words.exit_text(state.rank.ended)
    are = words.verb(ranks, "is", "are")
    if state.act.name == "destroy_process_group":
        return f"{are} in destroy_process_group{words.at(state.place)}"
    return f"{are} at {words.verb(ranks, 'its', 'their')} end"
