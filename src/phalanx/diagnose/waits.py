"""Finds which ranks wait for which: the collectives and messages they wait in, and the ranks missing there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from phalanx.diagnose import words
from phalanx.diagnose.description import described
from phalanx.diagnose.evidence import CallEvidence, Evidence, GroupEvidence, Rank
from phalanx.diagnose.rank_state import MEETINGS, RankState, state_of, unstarted

_Memo = dict[tuple[str, int, str, frozenset[int]], frozenset[int]]
_Groups = dict[tuple[int, ...], frozenset[int]]  # ranks of a group in its order -> those about which something is known


@dataclass(frozen=True)
class WaitGraph:
    """All ranks, and who waits for whom."""

    evidence: Evidence
    states: dict[int, RankState]
    awaits: dict[int, frozenset[int]] = field(default_factory=dict)  # waiting rank -> missing ranks

    def of(self, ranks: Iterable[int]) -> list[RankState]:
        """Return the states of these ranks, in order."""
        return [self.states[rank] for rank in sorted(ranks) if rank in self.states]

    def waiting_for(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that wait for these ranks, directly or through others."""
        reached = set(ranks)
        found: set[int] = set()
        while True:
            late = {missing for missing in set(self.awaits.values()) if not missing.isdisjoint(reached)}
            more = {rank for rank, missing in self.awaits.items() if rank not in found and missing in late}
            if not more:
                return sorted(found - set(ranks))
            found |= more
            reached |= more

    def wait_for(self, ranks: Sequence[int]) -> str:
        """Return e.g. "; the other 3 wait for it in all_reduce #214 (DDP bucket 1, 6.5 MB)"."""
        waiting = self.of(self.waiting_for(ranks))
        if not waiting:
            return ""
        first = next((each for each in waiting if each.call is not None), waiting[0])
        numbers = [each.number for each in waiting]
        whom = words.verb(ranks, "it", "them")
        return (
            f"; {words.others(numbers, self.evidence, ranks)} {words.verb(numbers, 'waits', 'wait')} for {whom} in "
            f"{described(first)}"
        )


def awaited_by(missing: Iterable[frozenset[int]]) -> set[int]:
    """Return all ranks in these sets. Equal sets are read once: thousands may wait for the same thousands."""
    return set().union(*set(missing))


def timed(evidence: Evidence) -> Evidence:
    """Drop kernel start times unless the kernel of another rank has started."""
    started = {_place(call) for rank in evidence.ranks for call in rank.calls if call.started}
    if all(call.started is not False or _place(call) in started for rank in evidence.ranks for call in rank.calls):
        return evidence
    ranks = (
        replace(rank, calls=tuple(_untimed(call) if _place(call) not in started else call for call in rank.calls))
        for rank in evidence.ranks
    )
    return replace(evidence, ranks=tuple(ranks))


def _place(call: CallEvidence) -> tuple[str, str, int]:
    return call.group, call.backend, call.seq


def _untimed(call: CallEvidence) -> CallEvidence:
    return call if call.started is None else replace(call, started=None)


def survey(evidence: Evidence) -> WaitGraph:
    """Return the states of all ranks, and who waits for whom."""
    evidence = timed(evidence)
    states = {rank.rank: state_of(evidence, rank) for rank in evidence.ranks}
    awaits: dict[int, frozenset[int]] = {}
    memo: _Memo = {}  # most ranks wait in the same call
    groups: _Groups = {}
    for state in states.values():
        missing = _missing(state, states, evidence, memo, groups)
        if missing is not None:
            awaits[state.number] = missing - {state.number} if state.number in missing else missing
    return WaitGraph(evidence, states, awaits)


def _missing(
    state: RankState,
    states: dict[int, RankState],
    evidence: Evidence,
    memo: _Memo,
    groups: _Groups,
) -> frozenset[int] | None:
    call = state.call
    if not state.stuck:  # a stopped rank does not arrive, however slow its steps are
        if call is None or call.op in ("send", "recv"):
            return None
        members = members_of(state, states, groups)
        return frozenset(rank for rank in members if states[rank].stopped) or None
    if call is None:
        if state.act.what not in MEETINGS or state.gone or state.stopped:
            return None
        all_ranks = set(states) | set(range(evidence.world_size))
        here = {
            each.number
            for each in states.values()
            if each.act.what == state.act.what and not (each.gone or each.stopped)
        }
        past = {each.number for each in states.values() if each.act.what != "join" and each.rank.groups}
        if state.act.what == "join" and past:  # a rank with a group has joined
            return frozenset(all_ranks - here - past) or None
        return frozenset(all_ranks - here)
    if call.op in ("send", "recv"):
        peer = states.get(call.peer) if call.peer is not None else None
        return frozenset() if peer is None or meet(state, peer) else frozenset({peer.number})
    members = members_of(state, states, groups)
    key = (call.group, call.seq, f"{'' if call.seq > 0 else call.op} {call.started}", members)
    if key not in memo:
        memo[key] = frozenset(rank for rank in members if _absent(states[rank], call))
    return memo[key]


def members_of(state: RankState, states: dict[int, RankState], known: _Groups | None = None) -> frozenset[int]:
    """Return the ranks of the group of a call. `known` caches the groups of earlier calls."""
    call = state.call
    group = next((each for each in state.rank.groups if call is not None and each.name == call.group), None)
    listed = group.ranks if group is not None else ()
    known = known if known is not None else {}
    if listed not in known:
        known[listed] = frozenset(states).intersection(listed) if listed else frozenset(states)
    return known[listed]


def _absent(state: RankState, call: CallEvidence) -> bool:
    if state.stopped or state.gone:  # it cannot continue what it called
        return not any(each.done and (each.group, each.seq) == (call.group, call.seq) for each in state.rank.calls)
    if call.seq > 0:
        reached = newest(state.rank, call.group)
        if reached is not None:
            return reached < call.seq or (bool(call.started) and _not_started(state.rank, call))
    own = state.call
    return own is None or own.group != call.group or (call.seq <= 0 and own.op != call.op)


def _not_started(rank: Rank, call: CallEvidence) -> bool:
    """Return whether its GPU has not reached the collective that other GPUs are in."""
    head = unstarted(rank)
    return head is not None and (head.group, head.backend) == (call.group, call.backend) and head.seq <= call.seq


def newest(rank: Rank, name: str) -> int | None:
    """Return the number of the newest collective that a rank has called in a group."""
    group: GroupEvidence | None = next((each for each in rank.groups if each.name == name), None)
    called = [call.seq for call in rank.calls if call.group == name and call.seq > 0]
    if group is not None and group.enqueued >= 0:
        called.append(group.enqueued)
    return max(called, default=None)


def meet(one: RankState, other: RankState) -> bool:
    """Return whether two calls are a send and its receive."""
    a, b = one.call, other.call
    if a is None or b is None or {a.op, b.op} != {"send", "recv"}:
        return False
    if b.peer not in (None, one.number):
        return False
    return a.tag is None or b.tag is None or a.tag == b.tag
