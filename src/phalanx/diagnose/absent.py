"""Finds the rank that did not take part in a collective, barrier or store call that timed out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phalanx.diagnose import words
from phalanx.diagnose.description import being, described
from phalanx.diagnose.diagnosis import diagnose
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rank_state import MEETINGS, PATIENCE, RankState
from phalanx.diagnose.rules import children
from phalanx.diagnose.rules.collectives.timeouts import Timeout
from phalanx.diagnose.verdict import Verdict
from phalanx.diagnose.waits import WaitGraph, survey

_WAITED = 30.0  # seconds to assume if the message does not say


def blame(evidence: Evidence, late: int, timeout: Timeout) -> list[str]:
    """Return which rank is missing and where it was, then the evidence and a fix. Empty: unknown."""
    graph = survey(_as_stuck(evidence, timeout))
    victim = graph.states.get(late)
    if victim is None:
        return []
    verdicts = diagnose(graph.evidence)
    certain = next((verdict for verdict in verdicts if verdict.certain and verdict.kind != "exited"), None)
    if certain is not None:
        return [certain.text, *certain.details, *([f"fix: {certain.fix}"] if certain.fix else [])]
    missing = _missing(graph, victim, timeout)
    if not missing:
        return _nobody(graph, victim, timeout)
    groups = _together(missing)
    first = groups[0]
    text = f"{words.who(_numbers(first))} did not {_do(victim, timeout)}: {_being(first)}"
    more = [f"{words.who(_numbers(group))}: {_being(group)}" for group in groups[1:4]]
    return [text, *more, *_shown(first, verdicts)]


def _do(victim: RankState, timeout: Timeout) -> str:
    """Return e.g. "reach all_reduce #3 at train.py:7 within 5 s"."""
    seconds = words.duration(timeout.seconds) if timeout.seconds else ""
    within, call = f" within {seconds}" if seconds else "", victim.call
    if call is not None and call.op in ("send", "recv"):
        what = "send" if call.op == "recv" else "receive"
        return f"{what} what rank {victim.number} waited for in {described(victim)}{within}"
    if call is not None or victim.act.what in MEETINGS:
        return f"reach {described(victim)}{within}"
    return f"arrive; rank {victim.number} waited{words.at(victim.place)}{f' for {seconds}' if seconds else ''}"


def _as_stuck(evidence: Evidence, timeout: Timeout) -> Evidence:
    """Treat ranks as stuck: the victim waited for a full timeout, however short that was."""
    waited = max(evidence.waited, timeout.seconds or _WAITED, PATIENCE)
    ranks = tuple(msgspec.structs.replace(rank, usual=0.0, since=max(rank.since, waited)) for rank in evidence.ranks)
    return msgspec.structs.replace(evidence, waited=waited, ranks=ranks)


def _missing(graph: WaitGraph, victim: RankState, timeout: Timeout) -> list[RankState]:
    """Return the missing ranks that wait for no other rank."""
    awaited = graph.awaits.get(victim.number, frozenset())
    if not awaited and timeout.ranks and not timeout.key:
        awaited = frozenset(timeout.ranks) - {victim.number}
    roots, seen, ahead = set[int](), {victim.number}, list(awaited)
    while ahead:  # a missing rank may itself wait for another
        rank = ahead.pop()
        if rank not in seen:
            seen.add(rank)
            further = graph.awaits.get(rank, frozenset())
            ahead += further
            roots |= set() if further else {rank}
    return graph.of(roots or awaited)


def _nobody(graph: WaitGraph, victim: RankState, timeout: Timeout) -> list[str]:
    """Return lines for a timeout without a missing rank: a key that no rank has set, or the network."""
    if not timeout.key or victim.act.what in MEETINGS:
        return []
    others = [each for each in graph.of(graph.states) if each.number != victim.number]
    where = f"rank {victim.number} waited for{words.at(victim.place)}"
    text = f"no rank set the key {timeout.key!r} that {where} within {words.duration(timeout.seconds)}"
    return [text, *(f"{words.who(_numbers(group))}: {_being(group)}" for group in _together(others)[:4])]


def _together(states: Sequence[RankState]) -> list[list[RankState]]:
    """Return the ranks that do the same at the same place."""
    groups: dict[str, list[RankState]] = {}
    for each in states:
        groups.setdefault(_doing(each), []).append(each)
    return list(groups.values())


def _numbers(group: Sequence[RankState]) -> list[int]:
    return [each.number for each in group]


def _being(group: Sequence[RankState]) -> str:
    subject = words.verb(_numbers(group), "it", "they")
    gone = group[0].rank.ended is not None
    return f"{subject} {'' if gone else words.verb(_numbers(group), 'was ', 'were ')}{_doing(group[0])}"


def _doing(state: RankState) -> str:
    if state.rank.ended is not None:
        return words.exit_text(state.rank.ended)
    if state.unseen:
        return f"not to be seen ({state.rank.note})" if state.rank.note else "not to be seen"
    process_state = {"T": "stopped (SIGSTOP) ", "t": "held by a tracer "}.get(
        state.rank.process.state if state.rank.process else "", ""
    )
    return f"{process_state}{being(state)}"


def _shown(group: Sequence[RankState], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the processes that it waited for, the source line, and a fix."""
    first, numbers = group[0], set(_numbers(group))
    awaited = children.awaited(first.rank, first.act)
    found = next((verdict for verdict in verdicts if numbers & set(verdict.ranks)), None)
    if found is not None:
        details = [detail for detail in found.details if detail not in awaited]
        return [*awaited, *details[:4], *([f"fix: {found.fix}"] if found.fix else [])]
    return [f"its line: {first.place.source}"] if first.place is not None and first.place.source else []
