"""Finds the first sequence number at which the ranks of a group did not call the same collective.

Each rank numbers the collectives of a group by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from phalanx.diagnose import frames, history, words
from phalanx.diagnose.evidence import CallEvidence, Frame
from phalanx.diagnose.history import Difference, Item, Log, Shift
from phalanx.diagnose.rank_state import RankState, trail
from phalanx.diagnose.waits import WaitGraph

_EARLIER = 256  # collectives before a difference that are kept, to show what the loop does
_LOOK_BACK = 16  # maximum number of previous collectives that are compared to predict the next
_SAME_INPUTS = ("all_reduce", "broadcast", "reduce", "all_gather", "_allgather_base", "_all_gather_base", "gather")

_Pair = tuple[RankState, CallEvidence]


@dataclass(frozen=True)
class Divergence:
    """Which ranks called something else, and what the others called."""

    group: str
    seq: int
    odd: tuple[_Pair, ...]
    rest: tuple[_Pair, ...]
    backend: str = ""
    passed: bool = False  # found in the records of all ranks: it may be long past
    newest: bool = True  # the odd ranks have called nothing since
    shift: Shift = ""  # how the collectives of the odd ranks continue after it
    begin: int = 0  # the first sequence number that could be compared: older records are overwritten
    overwritten: tuple[int, ...] = ()  # ranks that no longer have its record
    earlier: Mapping[int, Sequence[CallEvidence]] = field(default_factory=dict)  # rank -> what it called before

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from the majority."""
        return tuple(state.number for state, _ in self.odd)

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks of the majority."""
        return tuple(state.number for state, _ in self.rest)


_Members = tuple[int, ...]
_Key = tuple[str, str, _Members]  # name, backend and ranks of a group


def divergences(graph: WaitGraph) -> list[Divergence]:
    """Return one divergence per group: between unfinished calls, or an earlier one in the records."""
    now, then = _present(graph), _recorded(graph)
    found = dict(now)
    for key, divergence in then.items():
        known = now.get(key)
        if known is None or divergence.seq < known.seq:
            found[key] = divergence
        elif divergence.seq == known.seq:
            found[key] = replace(known, shift=divergence.shift, newest=divergence.newest, earlier=divergence.earlier)
    return [found[key] for key in sorted(found)]


def _present(graph: WaitGraph) -> dict[_Key, Divergence]:
    # Only unfinished calls: finished ones are compared by their records.
    undone = {(call.group, call.seq) for rank in graph.evidence.ranks for call in rank.calls if not call.done}
    called: dict[_Key, dict[int, list[_Pair]]] = {}
    known = _known(graph)
    backends = {(call.group, call.backend) for rank in graph.evidence.ranks for call in rank.calls if call.backend}
    for state in graph.of(graph.states):
        members = _members(state)
        for call in state.rank.calls:
            if call.seq > 0 and (call.group, call.seq) in undone:
                only = [backend for group, backend in backends if group == call.group]
                backend = call.backend or (only[0] if len(only) == 1 else "")
                key = (call.group, backend, members.get(call.group) or known.get(call.group, ()))
                called.setdefault(key, {}).setdefault(call.seq, []).append((state, call))
    found = {key: _first(key, called[key]) for key in called}
    return {key: divergence for key, divergence in found.items() if divergence is not None}


def _members(state: RankState) -> dict[str, _Members]:
    return {group.name: group.ranks for group in state.rank.groups if group.ranks}


def _known(graph: WaitGraph) -> dict[str, _Members]:
    """Return the ranks of each group, for ranks that do not report them."""
    found: dict[str, _Members] = {}
    for state in graph.of(graph.states):
        found = {**_members(state), **found}
    return found


def _recorded(graph: WaitGraph) -> dict[_Key, Divergence]:
    """Return the first difference in the records of each group."""
    known = _known(graph)
    groups: dict[_Key, dict[int, Log]] = {}
    for state in graph.of(graph.states):
        members = _members(state)
        for (name, backend), log in history.logs(state.rank.history).items():
            ranks = members.get(name) or known.get(name, ())
            if not ranks or state.number in ranks:
                groups.setdefault((name, backend, ranks), {})[state.number] = log
    found: dict[_Key, Divergence] = {}
    for key, logs in groups.items():
        difference = history.first_difference(logs)
        if difference is not None:
            found[key] = _differing(graph, key, difference, logs)
    return found


def _differing(graph: WaitGraph, key: _Key, difference: Difference, logs: Mapping[int, Log]) -> Divergence:
    name, backend, _ = key
    seq = difference.seq

    def pairs(ranks: Sequence[int]) -> list[_Pair]:
        return [(graph.states[rank], _call(graph.states[rank], key, seq, _at(logs[rank][seq], difference.part)))
                for rank in ranks]  # fmt: skip

    kinds = [pairs(side.ranks) for side in difference.sides]
    *odd, rest = sorted(kinds, key=_oddness)
    by_rank = sorted((pair for each in odd for pair in each), key=lambda pair: pair[0].number)
    first, other = by_rank[0][0].number, rest[0][0].number
    earlier = {
        rank: [
            _call(graph.states[rank], key, number, item)
            for number in [number for number in sorted(logs[rank]) if number < seq][-_EARLIER:]
            for item in logs[rank][number][:1]
        ]
        for rank in (first, other)
    }
    return Divergence(
        name,
        seq,
        tuple(by_rank),
        tuple(rest),
        backend=backend,
        passed=True,
        newest=max(logs[first]) == seq,
        shift=history.shift(logs[first], logs[other], seq),
        begin=difference.begin,
        overwritten=difference.overwritten,
        earlier=earlier,
    )


def _at(items: tuple[Item, ...], part: int) -> Item:
    return items[min(part, len(items) - 1)]


def _call(state: RankState, key: _Key, seq: int, item: Item) -> CallEvidence:
    """Return a recorded item as a call."""
    group, backend, _ = key
    signature = item.signature
    shapes = signature.outputs if signature.op in history.OUTPUTS else signature.shapes
    for call in state.rank.calls:
        if (call.group, call.backend, call.seq) == (group, backend, seq):
            return structs.replace(call, shapes=shapes) if signature.op in history.OUTPUTS else call
    completed = next((each.completed for each in state.rank.groups if each.name == group), -1)
    return CallEvidence(
        group=group,
        seq=seq,
        op=signature.called or signature.op,
        dtypes=signature.dtypes,
        shapes=shapes,
        outputs=signature.outputs,
        done=seq <= completed,
        site=item.site,
        reduction=signature.reduction,
        root=signature.root,
        backend=backend,
    )


def _oddness(pairs: Sequence[_Pair]) -> tuple[int, bool, int]:
    """Order the sides: the fewest ranks first, then calls under a condition on the rank, then ranks without rank 0."""
    return len(pairs), all(guard(*pair) is None for pair in pairs), -pairs[0][0].number


def _first(key: _Key, called: dict[int, list[_Pair]]) -> Divergence | None:
    for seq in sorted(called):
        if len({state.number for state, _ in called[seq]}) < len(called[seq]):
            continue  # coalesced collectives: history.py compares them in order
        kinds = _kinds(called[seq])
        if len(kinds) < 2:
            continue
        *odd, rest = sorted(kinds, key=_oddness)
        by_rank = sorted((pair for each in odd for pair in each), key=lambda pair: pair[0].number)
        return Divergence(key[0], seq, tuple(by_rank), tuple(rest), backend=key[1])
    return None


def _kind(call: CallEvidence) -> tuple[object, ...]:
    """Return what must be equal on all ranks. None: unknown, or irrelevant."""
    if call.op not in _SAME_INPUTS:
        return call.op, None, None, call.reduction or None, call.root
    uneven = len(set(call.outputs)) > 1  # an all_gather may have outputs of different sizes
    size = words.elements(call.shapes) if call.shapes and not uneven else None
    return call.op, size, call.dtypes[0] if call.dtypes else None, call.reduction or None, call.root


def _kinds(pairs: list[_Pair]) -> list[list[_Pair]]:
    """Group ranks that made the same call. A rank that reports nothing counts as the majority."""
    found: dict[tuple[object, ...], list[_Pair]] = {}
    by_kind: dict[tuple[object, ...], list[_Pair]] = {}
    for state, call in pairs:
        by_kind.setdefault(_kind(call), []).append((state, call))
    for kind in sorted(by_kind, key=lambda kind: (kind.count(None), -len(by_kind[kind]))):
        like = [known for known in found if _compatible(kind, known)]
        found.setdefault(max(like, key=lambda known: len(found[known]), default=kind), []).extend(by_kind[kind])
    return [sorted(each, key=lambda pair: pair[0].number) for each in found.values()]


def _compatible(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def alike(one: CallEvidence, other: CallEvidence) -> bool:
    """Return whether two calls are the same collective at the same place."""
    a, b = frames.own(one.site), frames.own(other.site)
    if a is not None and b is not None and (a.file, a.line) != (b.file, b.line):
        return False
    return _kind(one) == _kind(other)


def guard(state: RankState, call: CallEvidence) -> Frame | None:
    """Return the innermost frame of a call that is under a condition on the rank."""
    return next((frame for frame in trail(state, call) if frame.guard), None)


def ways(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> tuple[Frame, Frame] | None:
    """Return the line of each call in the outermost function that both have in common."""
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return None
        if mine.line != theirs.line:
            return mine, theirs
    return None


def past(state: RankState, divergence: Divergence) -> list[CallEvidence]:
    """Return the calls of a rank before the divergence."""
    if divergence.earlier.get(state.number):
        return list(divergence.earlier[state.number])
    return [call for call in state.rank.calls if call.group == divergence.group and 0 < call.seq < divergence.seq]


def expected(calls: list[CallEvidence]) -> CallEvidence | None:
    """Return what followed the last time the same collectives were called."""
    best, at = 0, None
    for end in range(len(calls) - 1, 0, -1):
        length = 0
        while length < min(end, _LOOK_BACK) and alike(calls[end - 1 - length], calls[-1 - length]):
            length += 1
        if length > best:
            best, at = length, end
    return None if at is None else calls[at]
