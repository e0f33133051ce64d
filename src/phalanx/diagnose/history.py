"""Finds the first collective that differs between the ranks of a group, from the records of their flight recorders.

NCCL does not compare what ranks call: a broadcast that meets an all_reduce gives wrong numbers, and the ranks continue.
The hang comes later, or never. Therefore calls with the same sequence number are compared here, finished or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.diagnose import frames, words
from phalanx.diagnose.evidence import Frame, History, Recorded, Signature

# Operations whose tensors have the same number of elements on all ranks. Sizes of other operations may differ:
# all_to_all with splits, all_gather_v, reduce_scatter_v. For scatter and gather only the root has all parts.
_INPUTS = frozenset(
    {
        *("all_reduce", "allreduce", "all_reduce_coalesced", "allreduce_coalesced", "broadcast", "reduce", "gather"),
        *("all_gather", "allgather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"),
        *("_allgather_base", "all_gather_into_tensor_coalesced"),
    }
)
OUTPUTS = frozenset(
    {
        *("scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"),
        "reduce_scatter_tensor_coalesced",
    }
)

_Key = tuple[object, ...]
Shift = Literal["", "replaced", "added", "skipped"]
_SHIFTS: tuple[tuple[Shift, int, int], ...] = (("replaced", 1, 1), ("added", 1, 0), ("skipped", 0, 1))
_AHEAD = 64  # how many collectives after a difference are compared


class Item(NamedTuple):
    """One collective, and where it was called."""

    signature: Signature
    site: tuple[Frame, ...] = ()


Log = Mapping[int, tuple[Item, ...]]  # sequence number -> items with that number; several: coalesced into one


@dataclass(frozen=True)
class HistorySide:
    """Ranks that made the same call."""

    ranks: tuple[int, ...]
    items: tuple[Item, ...]  # items of the first of these ranks

    @property
    def item(self) -> Item:
        """The first of its items."""
        return self.items[0]


@dataclass(frozen=True)
class Difference:
    """The first place where the recorded collectives of ranks differ."""

    seq: int
    sides: tuple[HistorySide, ...]  # the side with the fewest ranks first; if equal, the side without the lowest rank
    begin: int  # the first sequence number that two ranks still have: earlier calls cannot be compared
    overwritten: tuple[int, ...] = ()  # ranks whose records begin after it
    part: int = 0  # index of the first coalesced collective that differs


def logs(history: History) -> dict[tuple[str, str], dict[int, tuple[Item, ...]]]:
    """Return the recorded collectives by group and backend."""
    sites = (*history.sites, ())
    items = [Item(signature, sites[signature.site]) for signature in history.signatures]
    return {(each.group, each.backend): _log(each, items) for each in history.groups}


def _log(recorded: Recorded, items: Sequence[Item]) -> dict[int, tuple[Item, ...]]:
    alone = [(item,) for item in items]
    found: dict[int, tuple[Item, ...]] = {}
    for seq, kind in zip(recorded.seqs, recorded.kinds, strict=True):
        found[seq] = (*found[seq], items[kind]) if seq in found else alone[kind]
    return found


def first_difference(histories: Mapping[int, Log]) -> Difference | None:
    """Return the first difference in one group.

    For each sequence number, only ranks that have a record are compared. A rank that has not reached it does not
    differ, nor does a rank whose older records are overwritten.
    """
    known = {rank: log for rank, log in sorted(histories.items()) if log}
    if len(known) < 2:
        return None
    begin = sorted(map(min, known.values()))[1]
    last = {rank: max(log) for rank, log in known.items()}
    keys: dict[_Key, int] = {}
    numbers: dict[int, int] = {}  # by identity: a log uses the same object for all collectives of a kind
    for log in known.values():
        for items in log.values():
            if id(items) not in numbers:
                numbers[id(items)] = keys.setdefault(tuple(map(_key, items)), len(keys))
    for seq in range(begin, max(last.values()) + 1):
        if len({numbers[id(log[seq])] for log in known.values() if seq in log}) < 2:
            continue
        here = {rank: log[seq] for rank, log in known.items() if seq in log}
        by_key: dict[_Key, list[int]] = {}
        for rank, items in here.items():
            by_key.setdefault(tuple(map(_key, items)), []).append(rank)
        sides = _sides(by_key, here, unfinished={rank for rank in here if last[rank] == seq})
        if len(sides) > 1:
            overwritten = tuple(rank for rank, log in known.items() if min(log) > seq)
            return Difference(seq, tuple(sides), begin, overwritten, _part(sides))
    return None


def _key(item: Item) -> _Key:
    """Return what all ranks must agree on. None: unknown, or allowed to differ."""
    signature = item.signature
    dtype = signature.dtypes[0] if signature.dtypes else None
    return signature.op, _size(signature), dtype, signature.reduction or None, signature.root


def _size(signature: Signature) -> int | None:
    if signature.op in OUTPUTS:
        return words.elements(signature.outputs) if signature.outputs else None
    if signature.op not in _INPUTS or not signature.shapes:
        return None
    uneven = len(set(signature.outputs)) > 1 and "gather" in signature.op
    return None if uneven else words.elements(signature.shapes)


def _sides(
    by_key: dict[_Key, list[int]], here: Mapping[int, tuple[Item, ...]], unfinished: set[int]
) -> list[HistorySide]:
    """Group ranks by what they called. A rank inside a coalesced block has recorded only its first collectives."""
    longest = max(len(items) for items in here.values())
    begun = [len(items) for rank, items in here.items() if rank in unfinished and len(items) < longest]
    shown = min(begun, default=longest)
    merged: dict[_Key, list[int]] = {}
    for key in sorted(by_key, key=lambda key: (_unknown(key), -len(by_key[key]))):
        like = [other for other in merged if _compatible(key[:shown], other[:shown])]
        merged.setdefault(max(like, key=lambda other: len(merged[other]), default=key), []).extend(by_key[key])
    found = [HistorySide(tuple(sorted(ranks)), here[min(ranks)]) for ranks in merged.values()]
    return sorted(found, key=lambda side: (len(side.ranks), -side.ranks[0]))


def _unknown(key: _Key) -> int:
    return sum(part.count(None) for part in key if isinstance(part, tuple))


def _compatible(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_compatible, one, other))
    return one == other or one is None or other is None


def _part(sides: Sequence[HistorySide]) -> int:
    first, *others = (side.items for side in sides)
    for index, item in enumerate(first):
        for items in others:
            if index >= len(items) or not _compatible(_key(item), _key(items[index])):
                return index
    return 0


def shift(odd: Log, rest: Log, seq: int) -> Shift:
    """Return how the collectives continue after a difference: replaced, one more, or one less.

    Empty: nothing follows, or several of these fit, as in a loop with one collective.
    """
    fits = [name for name, mine, theirs in _SHIFTS if _fits(odd, seq + mine, rest, seq + theirs)]
    return fits[0] if len(fits) == 1 else ""


def _fits(odd: Log, mine: int, rest: Log, theirs: int) -> bool:
    count = 0
    while count < _AHEAD and mine + count in odd and theirs + count in rest:
        if not _alike(odd[mine + count], rest[theirs + count]):
            return False
        count += 1
    return count > 0


def _alike(one: tuple[Item, ...], other: tuple[Item, ...]) -> bool:
    """Return whether two items are the same collective at the same place."""
    if not _compatible(tuple(map(_key, one)), tuple(map(_key, other))):
        return False
    a, b = frames.own(one[0].site), frames.own(other[0].site)
    return a is None or b is None or (a.file, a.line) == (b.file, b.line)
