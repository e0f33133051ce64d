"""Where the ranks of a group part: the first number under which they have not called one and the same collective.

Collectives of a group are numbered by each rank for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Call, Frame
from phalanx.diagnose.standing import Field, Standing, trail

_LOOK_BACK = 16  # collectives that have to repeat, at most, to say what comes next
_SAME_INPUTS = ("all_reduce", "broadcast", "reduce", "all_gather", "_allgather_base", "_all_gather_base", "gather")

_Pair = tuple[Standing, Call]


@dataclass(frozen=True)
class Parting:
    """Who called something else, and what the others called."""

    group: str
    seq: int
    odd: tuple[_Pair, ...]
    rest: tuple[_Pair, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(standing.number for standing, _ in self.odd)

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(standing.number for standing, _ in self.rest)


def partings(field: Field) -> list[Parting]:
    # What all of them have done has been the same, or at least no matter.
    undone = {(call.group, call.seq) for rank in field.evidence.ranks for call in rank.calls if not call.done}
    called: dict[tuple[str, tuple[int, ...]], dict[int, list[_Pair]]] = {}
    known: dict[str, tuple[int, ...]] = {}  # for a rank that does not tell who is in a group
    for standing in field.of(field.standings):
        members = {group.name: group.ranks for group in standing.rank.groups if group.ranks}
        known = {**members, **known}
        for call in standing.rank.calls:
            if call.seq > 0 and (call.group, call.seq) in undone:
                group = (call.group, members.get(call.group) or known.get(call.group, ()))
                called.setdefault(group, {}).setdefault(call.seq, []).append((standing, call))
    found = (_first(group[0], called[group]) for group in sorted(called))
    return [parting for parting in found if parting is not None]


def _first(name: str, called: dict[int, list[_Pair]]) -> Parting | None:
    for seq in sorted(called):
        kinds = _kinds(called[seq])
        if len(kinds) < 2:
            continue
        # The fewest are odd. Of equally many those whose code asks for the rank, or that rank 0 is not among.
        *odd, rest = sorted(
            kinds,
            key=lambda each: (len(each), all(guard(*pair) is None for pair in each), -each[0][0].number),
        )
        by_rank = sorted((pair for each in odd for pair in each), key=lambda pair: pair[0].number)
        return Parting(name, seq, tuple(by_rank), tuple(rest))
    return None


def _kind(call: Call) -> tuple[object, ...]:
    """What has to be the same for all ranks; None: not known, or of no matter."""
    if call.op not in _SAME_INPUTS:
        return call.op, None, None, call.reduction or None, call.root
    uneven = len(set(call.outputs)) > 1  # an all_gather may be
    size = words.elements(call.shapes) if call.shapes and not uneven else None
    return call.op, size, call.dtypes[0] if call.dtypes else None, call.reduction or None, call.root


def _kinds(pairs: list[_Pair]) -> list[list[_Pair]]:
    """Those together who have called the same. What a rank does not tell is no difference: it is with the most."""
    found: dict[tuple[object, ...], list[_Pair]] = {}
    by_kind: dict[tuple[object, ...], list[_Pair]] = {}
    for standing, call in pairs:
        by_kind.setdefault(_kind(call), []).append((standing, call))
    for kind in sorted(by_kind, key=lambda kind: (kind.count(None), -len(by_kind[kind]))):
        like = [known for known in found if _compatible(kind, known)]
        found.setdefault(max(like, key=lambda known: len(found[known]), default=kind), []).extend(by_kind[kind])
    return [sorted(each, key=lambda pair: pair[0].number) for each in found.values()]


def _compatible(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def alike(one: Call, other: Call) -> bool:
    """The same collective, as far as can be seen: of the same place, where that is known."""
    a, b = frames.own(one.site), frames.own(other.site)
    if a is not None and b is not None and (a.file, a.line) != (b.file, b.line):
        return False
    return _kind(one) == _kind(other)


def guard(standing: Standing, call: Call) -> Frame | None:
    """The innermost place of a call that asks for the rank."""
    return next((frame for frame in trail(standing, call) if frame.guard), None)


def ways(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> tuple[Frame, Frame] | None:
    """The outermost function that both are in, at two of its lines."""
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return None
        if mine.line != theirs.line:
            return mine, theirs
    return None


def past(standing: Standing, parting: Parting) -> list[Call]:
    return [call for call in standing.rank.calls if call.group == parting.group and 0 < call.seq < parting.seq]


def expected(calls: list[Call]) -> Call | None:
    """What came next when last the collectives before were as they are now: a loop repeats itself."""
    best, at = 0, None
    for end in range(len(calls) - 1, 0, -1):
        length = 0
        while length < min(end, _LOOK_BACK) and alike(calls[end - 1 - length], calls[-1 - length]):
            length += 1
        if length > best:
            best, at = length, end
    return None if at is None else calls[at]
