"""What the tour shows: of every call, what each rank holds before and after. Pure; the calls are in tour.py.

A rank's numbers begin with its own digit, so that the picture tells where each came from, without colours too.
"""

# All take a rank and a world, whether they need them or not.
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Value = int | str


@dataclass(frozen=True)
class TourCell:
    """A value, and the rank that it came from."""

    value: Value
    origin: int | None = None  # the rank that it came from; None: from several


TourRow = list[TourCell | None]  # None: what is there is nobody's business, or nothing is
Rows = Callable[[int, int], TourRow]  # of this rank, in a world of that size


@dataclass(frozen=True)
class TourScene:
    """One collective: the values before and after it."""

    name: str
    title: str
    before: Rows
    after: Rows | None = None  # None: only `holds` can tell
    holds: Callable[[Sequence[Sequence[Value]], Sequence[Sequence[Value]]], bool] | None = None
    unit: str = ""


def own(count: int) -> Rows:
    """A rank's own numbers: rank 2 holds 20 21 …"""
    return lambda rank, world: [TourCell(10 * rank + place, rank) for place in range(count or world)]


def total(rows: Sequence[TourRow], how: Callable[[list[int]], int] = sum) -> TourRow:
    """Return the sum of each column, or another reduction."""
    return [
        TourCell(how([int(cell.value) for cell in column if cell is not None])) for column in zip(*rows, strict=True)
    ]


def _all(before: Rows, world: int) -> list[TourRow]:
    return [before(rank, world) for rank in range(world)]


def _few(rank: int, world: int) -> TourRow:
    """Two, where that of all ranks still fits on a line."""
    return own(2 if world <= 5 else 1)(rank, world)


def _everybodys(count: int) -> Rows:
    return lambda rank, world: [cell for row in _all(own(count), world) for cell in row]


def _only(root: int, rows: Rows) -> Rows:
    return lambda rank, world: rows(rank, world) if rank == root else []


def _sum(count: int, how: Callable[[list[int]], int] = sum) -> Rows:
    return lambda rank, world: total(_all(own(count), world), how)


def _of(source: Callable[[int, int], int], rows: Rows) -> Rows:
    """What another rank held."""
    return lambda rank, world: rows(source(rank, world), world)


def _words(rank: int, world: int) -> TourRow:
    return [TourCell(f"r{rank}", rank)]


def _hand(rank: int, world: int) -> TourRow:
    return [TourCell(f"a{other}", rank) for other in range(world)]


def _all_words(rank: int, world: int) -> TourRow:
    return [TourCell(f"r{other}", other) for other in range(world)]


def _column(rank: int, world: int) -> TourRow:
    """One piece from every rank: the one that is meant for this rank."""
    return [TourCell(10 * other + rank, other) for other in range(world)]


def _piece(rank: int, world: int) -> TourRow:
    return [TourCell(rank, 0)]


def _sum_of_column(rank: int, world: int) -> TourRow:
    return [TourCell(sum(10 * other + rank for other in range(world)))]


def _pair(rank: int, world: int) -> int:
    """Even ranks send to the next one; the last stays alone where the world is odd."""
    return rank - 1 if rank % 2 else rank


def _sum_of_kind(rank: int, world: int) -> TourRow:
    return total([own(2)(other, world) for other in range(rank % 2, world, 2)])


def _store_after(rank: int, world: int) -> TourRow:
    following = (rank + 1) % world
    return [TourCell(f"r{following}", following), TourCell(world)]


def _waited(before: Sequence[Sequence[Value]], after: Sequence[Sequence[Value]]) -> bool:
    """Nobody left before the last one came."""
    return min(int(row[0]) for row in after) >= max(int(row[0]) for row in before)


SCENES = (
    TourScene("broadcast", "one rank's tensor, to everybody", own(2), _of(lambda rank, world: 1, own(2))),
    TourScene("scatter", "rank 0 deals its pieces out", _only(0, own(0)), _piece),
    TourScene("gather", "rank 0 collects a tensor of each", own(1), _only(0, _everybodys(1))),
    TourScene("all_gather", "everybody gets a tensor of each", own(1), _everybodys(1)),
    TourScene(
        "all_gather_into_tensor", "the same, into one tensor", _few, lambda r, w: _everybodys(len(_few(r, w)))(r, w)
    ),
    TourScene("reduce", "the sum, on rank 0", own(2), lambda r, w: _sum(2)(r, w) if r == 0 else [None, None]),
    TourScene("all_reduce", "the sum, on every rank: what DDP does with gradients", own(2), _sum(2)),
    TourScene("all_reduce_max", "not only sums: the largest of each place", own(2), _sum(2, max)),
    TourScene("all_reduce_async", "begin, do something else, then wait", own(2), _sum(2)),
    TourScene("reduce_scatter", "each rank gets its piece of the sum: what FSDP does", own(0), _sum_of_column),
    TourScene("all_to_all", "each rank sends a piece to each: rows become columns", own(0), _column),
    TourScene("barrier", "no rank continues before the last one has come", lambda r, w: [], holds=_waited, unit="ms"),
    TourScene(
        "broadcast_objects", "Python objects; pickled, so among friends only", _words, _of(lambda r, w: 1, _words)
    ),
    TourScene("scatter_objects", "rank 0 deals objects out", _only(0, _hand), lambda r, w: [TourCell(f"a{r}", 0)]),
    TourScene("gather_objects", "rank 0 collects an object of each", _words, _only(0, _all_words)),
    TourScene("all_gather_objects", "everybody gets an object of each", _words, _all_words),
    TourScene("send_recv", "from one rank to one other: even ones send, odd ones receive", own(2), _of(_pair, own(2))),
    TourScene("ring", "everybody sends to the next, all at once", own(2), _of(lambda r, w: (r - 1) % w, own(2))),
    TourScene("groups", "a sum among the even ranks, and one among the odd", own(2), _sum_of_kind),
    TourScene("store", "keys and counters that all ranks share", _words, _store_after),
)
NAMES = tuple(scene.name for scene in SCENES)


def expected(scene: TourScene, rank: int, world: int) -> TourRow:
    """Return what a rank must have after the collective."""
    return scene.after(rank, world) if scene.after is not None else []


def faults(
    scene: TourScene, before: Sequence[Sequence[Value]], after: Sequence[Sequence[Value]]
) -> list[tuple[int, str]]:
    """(rank, in words) where ranks held something else than the picture says."""
    found: list[tuple[int, str]] = []
    if scene.holds is not None:
        return [] if scene.holds(before, after) else [(0, f"{scene.title} does not hold: {after} after {before}")]
    world = len(after)
    for rank in range(world):
        for when, seen, row in (
            ("before", before[rank], scene.before(rank, world)),
            ("after", after[rank], expected(scene, rank, world)),
        ):
            same = len(seen) == len(row) and all(
                cell is None or cell.value == value for value, cell in zip(seen, row, strict=True)
            )
            if not same:
                said = [None if cell is None else cell.value for cell in row]
                found.append((rank, f"holds {list(seen)} {when} the call, not {said}"))
    return found
