"""Ranks of a group whose collectives are not the same: another operation, other shapes, one too many or too few.

Collectives of a group are numbered by each rank for itself. What has one number must be one and the same; where it is
not, the first such number is where the ranks part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Call, Frame
from phalanx.diagnose.standing import Field, Standing, bucket, named, site, trail
from phalanx.diagnose.verdict import Verdict

_LOOK_BACK = 16  # collectives that have to repeat, at most, to say what comes next
_SAME_INPUTS = ("all_reduce", "broadcast", "reduce", "all_gather", "_allgather_base", "_all_gather_base", "gather")


@dataclass(frozen=True)
class Parting:
    """The first number that is not the same for all: who called something else, and what the others called."""

    group: str
    seq: int
    odd: tuple[tuple[Standing, Call], ...]
    rest: tuple[tuple[Standing, Call], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(standing.number for standing, _ in self.odd)

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(standing.number for standing, _ in self.rest)


def partings(field: Field) -> list[Parting]:
    names = {call.group for each in field.evidence.ranks for call in each.calls if call.seq > 0}
    return [parting for name in sorted(names) if (parting := _part(field, name)) is not None]


def _part(field: Field, name: str) -> Parting | None:
    called: dict[int, list[tuple[Standing, Call]]] = {}
    for standing in field.standings.values():
        for call in standing.rank.calls:
            if call.group == name and call.seq > 0:
                called.setdefault(call.seq, []).append((standing, call))
    for seq in sorted(called):
        kinds: dict[tuple[object, ...], list[tuple[Standing, Call]]] = {}
        for standing, call in called[seq]:
            kinds.setdefault(_kind(call), []).append((standing, call))
        if len(kinds) < 2 or all(call.done for _, call in called[seq]) or _merely_unknown(called[seq]):
            continue
        # The fewest are odd; of equally many those that asked for their rank, or that the lowest rank is not among.
        ordered = sorted(
            kinds.values(),
            key=lambda each: (len(each), not _guarded(each), -min(standing.number for standing, _ in each)),
        )
        odd = [pair for each in ordered[:-1] for pair in each]
        return Parting(name, seq, _by_rank(odd), _by_rank(ordered[-1]))
    return None


def _by_rank(pairs: list[tuple[Standing, Call]]) -> tuple[tuple[Standing, Call], ...]:
    return tuple(sorted(pairs, key=lambda pair: pair[0].number))


def _guarded(pairs: list[tuple[Standing, Call]]) -> bool:
    return any(guard(*pair) is not None for pair in pairs)


def _kind(call: Call) -> tuple[object, ...]:
    """What has to be the same for all ranks; None: not known, or of no matter."""
    if call.op not in _SAME_INPUTS:
        return call.op, None, None, call.reduction or None, call.root
    uneven = len(set(call.outputs)) > 1  # an all_gather may be
    size = words.elements(call.shapes) if call.shapes and not uneven else None
    return call.op, size, call.dtypes[0] if call.dtypes else None, call.reduction or None, call.root


def _merely_unknown(pairs: list[tuple[Standing, Call]]) -> bool:
    """What one rank does not tell is no difference."""
    known = [_kind(call) for _, call in pairs]
    return all(len({kind[index] for kind in known} - {None}) < 2 for index in range(len(known[0])))


def judge(field: Field, parting: Parting) -> Verdict:
    (standing, call), (other, beside) = parting.odd[0], parting.rest[0]
    who, them = words.who(parting.ranks), words.others(parting.others, field.evidence, parting.ranks)
    are = words.verb(parting.others, "is", "are")
    here, there = site(standing, call), site(other, beside)
    details = [f"{words.who([each.number])}: {_what(each, its)}" for each, its in (*parting.odd[:8], *parting.rest[:1])]
    ways = part_ways(trail(standing, call), trail(other, beside))
    if ways is not None and ways != (here, there):
        details.append(f"the ways part at {words.place(ways[0])} ({who}) and {words.place(ways[1])} ({them})")

    def verdict(kind: str, text: str, fix: str, place: Frame | None = here) -> Verdict:
        return Verdict(kind=kind, ranks=parting.ranks, text=text, details=tuple(details), place=place, fix=fix)

    same_place = here is not None and there is not None and (here.file, here.line) == (there.file, there.line)
    if call.op == beside.op and same_place:
        return _differs(parting, verdict, them)
    if (
        frames.in_model(call.site or standing.frames)
        and call.op == "broadcast"
        and not frames.in_model(beside.site or other.frames)
    ):
        return verdict(
            "evaluation",
            f"{who} alone {words.verb(parting.ranks, 'runs', 'run')} the forward of a DDP model{words.inside(here)}, "
            f"which broadcasts its buffers ({words.numbered(call)}); {them} {are} in {named(other, beside)}{words.at(there)}",
            "evaluate with model.module(...), or on all ranks",
        )
    after = _expected(other, parting)
    skipped = after is not None and _alike(after, beside) and not _alike(after, call)
    if skipped and bucket(beside, other.frames) and not bucket(call, standing.frames) and _came_from(standing, call):
        return verdict(
            "unused parameters",
            f"{who} did not reduce a DDP bucket that the others wait for in {named(other, beside)}{words.at(there)}: "
            f"parameters got no gradient there; it went on to {words.numbered(call)}{words.at(here)}",
            "DistributedDataParallel(..., find_unused_parameters=True), or the same branches of the model on all ranks",
        )
    mine, theirs = _first_guard(parting.odd), _first_guard(parting.rest)
    if mine is None and (standing.leaving or _left_loop(ways, call)):
        return verdict(
            "uneven data",
            f"{who} left the loop earlier than the others, to {words.numbered(call)}{words.at(here)}, while {them} {are} still "
            f"in {named(other, beside)}{words.at(there)}: uneven data",
            UNEVEN,
        )
    if mine is None and (theirs is not None or (skipped and _seen(other, parting, call))):
        return verdict(
            "skipped collective",
            f"{who} skipped a collective that {them} called{words.inside(theirs or there)}: {named(other, beside)}; "
            f"{who} went on to {words.numbered(call)}{words.at(here)}",
            _SAME,
        )
    if theirs is None and (mine is not None or (skipped and call.op == beside.op)):
        return verdict(
            "skipped collective",
            f"{who} called one more collective than the others, {words.numbered(call)}{words.inside(mine or here)}; "
            f"{them} {are} in {named(other, beside)}{words.at(there)}",
            _SAME,
            mine or here,
        )
    if call.op != beside.op:
        return verdict(
            "wrong operation",
            f"{who} called {call.op}{words.at(here)} where {them} called {beside.op}{words.at(there)} (#{call.seq})",
            _SAME,
        )
    return _differs(parting, verdict, them)


_SAME = "all ranks of a group have to call the same collectives in the same order"
UNEVEN = (
    "give all ranks as many batches: DistributedSampler with drop_last=True, or `with model.join():` around the loop"
)


def _differs(parting: Parting, verdict: Callable[[str, str, str], Verdict], them: str) -> Verdict:
    """The same operation with other contents."""
    (standing, call), (other, beside) = parting.odd[0], parting.rest[0]
    where = f" in {words.numbered(call)}{words.at(site(standing, call) or site(other, beside))}"
    who = words.who(parting.ranks)
    has, have = words.verb(parting.ranks, "has", "have"), words.verb(parting.others, "has", "have")
    if call.dtypes[:1] != beside.dtypes[:1] and call.dtypes and beside.dtypes:
        text = f"dtypes differ{where}: {who} {has} {call.dtypes[0]}, {them} {have} {beside.dtypes[0]}"
        return verdict("dtypes differ", text, "cast to one dtype before the collective")
    if words.elements(call.shapes) != words.elements(beside.shapes):
        odd = _list({words.shapes(its): each.number for each, its in parting.odd}, parting)
        text = f"shapes differ{where}: {odd}, {them} {have} {words.shapes(beside)}"
        return verdict("shapes differ", text, "pad to one shape, or drop the last batch (drop_last=True)")
    if call.root != beside.root:
        text = f"roots differ{where}: {who} {has} rank {call.root}, {them} {have} rank {beside.root}"
        return verdict("roots differ", text, "the same root on all ranks")
    text = f"reductions differ{where}: {who} {has} {call.reduction}, {them} {have} {beside.reduction}"
    return verdict("reductions differ", text, "the same reduction on all ranks")


def _list(seen: dict[str, int], parting: Parting) -> str:
    """rank 3 has [10]: one part for each shape that is not the others'"""
    parts = []
    for shape in seen:
        ranks = [each.number for each, its in parting.odd if words.shapes(its) == shape]
        parts.append(f"{words.who(ranks)} {words.verb(ranks, 'has', 'have')} {shape}")
    return ", ".join(parts[:4]) + (" ..." if len(parts) > 4 else "")


def _what(standing: Standing, call: Call) -> str:
    about = [words.shapes(call)] if call.shapes else []
    about += call.dtypes[:1]
    return f"{words.numbered(call)} {' '.join(about)}".rstrip() + words.inside(site(standing, call))


def guard(standing: Standing, call: Call) -> Frame | None:
    """The innermost place of a call that asks for the rank."""
    return next((frame for frame in trail(standing, call) if frame.guard), None)


def _first_guard(pairs: tuple[tuple[Standing, Call], ...]) -> Frame | None:
    return next((found for pair in pairs if (found := guard(*pair)) is not None), None)


def part_ways(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> tuple[Frame, Frame] | None:
    """The outermost function that both are in, at two of its lines."""
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return None
        if mine.line != theirs.line:
            return mine, theirs
    return None


def _left_loop(ways: tuple[Frame, Frame] | None, call: Call) -> bool:
    """The others are in a loop, and it is behind that."""
    if ways is None:
        return False
    mine, theirs = ways
    if theirs.loop:
        return mine.loop != theirs.loop and mine.line > theirs.line
    return call.op == "barrier" and mine.line > theirs.line and not mine.source


def _alike(one: Call, other: Call) -> bool:
    a, b = frames.own(one.site), frames.own(other.site)
    if a is not None and b is not None and (a.file, a.line) != (b.file, b.line):
        return False
    return _kind(one) == _kind(other)


def _came_from(standing: Standing, call: Call) -> bool:
    """The backward pass had begun to reduce, or nobody can say: the call before was one of its buckets."""
    before = next((each for each in standing.rank.calls if each.group == call.group and each.seq == call.seq - 1), None)
    return before is None or not before.site or bucket(before)


def _past(standing: Standing, parting: Parting) -> list[Call]:
    return [call for call in standing.rank.calls if call.group == parting.group and 0 < call.seq < parting.seq]


def _seen(standing: Standing, parting: Parting, call: Call) -> bool:
    return any(_alike(each, call) for each in _past(standing, parting))


def _expected(standing: Standing, parting: Parting) -> Call | None:
    """What came next when last the collectives before were as they are now: a loop repeats itself."""
    past = _past(standing, parting)
    best, at = 0, None
    for end in range(len(past) - 1, 0, -1):
        length = 0
        while length < min(end, _LOOK_BACK) and _alike(past[end - 1 - length], past[-1 - length]):
            length += 1
        if length > best:
            best, at = length, end
    return None if at is None else past[at]
