"""The scenes of the tour: what each rank holds before and after each call. Pure; the calls are in tour.py.

The numbers of a rank begin with its own digit, so that the origin of a value is visible without colors.
"""

# All functions have the signature of Rows.
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


TourRow = list[TourCell | None]  # None: empty, or undefined
Rows = Callable[[int, int], TourRow]  # (rank, world size)


@dataclass(frozen=True)
class TourScene:
    """One collective: the values before and after it."""

    name: str
    title: str
    before: Rows
    after: Rows | None = None  # None: checked by `holds` only
    holds: Callable[[Sequence[Sequence[Value]], Sequence[Sequence[Value]]], bool] | None = None
    unit: str = ""


def own(count: int) -> Rows:
    """Return a function for the initial numbers of a rank: rank 2 holds 20 21 …"""
    return lambda rank, world: [TourCell(10 * rank + place, rank) for place in range(count or world)]


def total(rows: Sequence[TourRow], how: Callable[[list[int]], int] = sum) -> TourRow:
    """Return the sum of each column, or another reduction."""
    return [
        TourCell(how([int(cell.value) for cell in column if cell is not None])) for column in zip(*rows, strict=True)
    ]


def _all(before: Rows, world: int) -> list[TourRow]:
    return [before(rank, world) for rank in range(world)]


def _few(rank: int, world: int) -> TourRow:
    """Return two numbers if those of all ranks fit on a line, otherwise one."""
    return own(2 if world <= 5 else 1)(rank, world)


def _all_ranks(count: int) -> Rows:
    return lambda rank, world: [cell for row in _all(own(count), world) for cell in row]


def _only(root: int, rows: Rows) -> Rows:
    return lambda rank, world: rows(rank, world) if rank == root else []


def _sum(count: int, how: Callable[[list[int]], int] = sum) -> Rows:
    return lambda rank, world: total(_all(own(count), world), how)


def _of(source: Callable[[int, int], int], rows: Rows) -> Rows:
    """Return what another rank held."""
    return lambda rank, world: rows(source(rank, world), world)


def _words(rank: int, world: int) -> TourRow:
    return [TourCell(f"r{rank}", rank)]


def _hand(rank: int, world: int) -> TourRow:
    return [TourCell(f"a{other}", rank) for other in range(world)]


def _all_words(rank: int, world: int) -> TourRow:
    return [TourCell(f"r{other}", other) for other in range(world)]


def _column(rank: int, world: int) -> TourRow:
    """Return the pieces that all ranks have for this rank."""
    return [TourCell(10 * other + rank, other) for other in range(world)]


def _piece(rank: int, world: int) -> TourRow:
    return [TourCell(rank, 0)]


def _sum_of_column(rank: int, world: int) -> TourRow:
    return [TourCell(sum(10 * other + rank for other in range(world)))]


def _pair(rank: int, world: int) -> int:
    """Return the sender for a rank: even ranks send to the next. The last rank of an odd world has no partner."""
    return rank - 1 if rank % 2 else rank


def _sum_of_kind(rank: int, world: int) -> TourRow:
    return total([own(2)(other, world) for other in range(rank % 2, world, 2)])


def _store_after(rank: int, world: int) -> TourRow:
    following = (rank + 1) % world
    return [TourCell(f"r{following}", following), TourCell(world)]


def _waited(before: Sequence[Sequence[Value]], after: Sequence[Sequence[Value]]) -> bool:
    """Return whether no rank continued before the last one arrived."""
    return min(int(row[0]) for row in after) >= max(int(row[0]) for row in before)


SCENES = (
    TourScene("broadcast", "one rank's tensor, to every rank", own(2), _of(lambda rank, world: 1, own(2))),
    TourScene("scatter", "rank 0 distributes its pieces", _only(0, own(0)), _piece),
    TourScene("gather", "rank 0 collects a tensor from each", own(1), _only(0, _all_ranks(1))),
    TourScene("all_gather", "every rank gets a tensor from each", own(1), _all_ranks(1)),
    TourScene(
        "all_gather_into_tensor", "the same, into one tensor", _few, lambda r, w: _all_ranks(len(_few(r, w)))(r, w)
    ),
    TourScene("reduce", "the sum, on rank 0", own(2), lambda r, w: _sum(2)(r, w) if r == 0 else [None, None]),
    TourScene("all_reduce", "the sum, on every rank: what DDP does with gradients", own(2), _sum(2)),
    TourScene("all_reduce_max", "not only sums: the maximum of each element", own(2), _sum(2, max)),
    TourScene("all_reduce_async", "begin, do something else, then wait", own(2), _sum(2)),
    TourScene("reduce_scatter", "each rank gets its piece of the sum: what FSDP does", own(0), _sum_of_column),
    TourScene("all_to_all", "each rank sends a piece to each: rows become columns", own(0), _column),
    TourScene("barrier", "no rank continues before the last one has come", lambda r, w: [], holds=_waited, unit="ms"),
    TourScene(
        "broadcast_objects", "Python objects; pickled: only between trusted ranks", _words, _of(lambda r, w: 1, _words)
    ),
    TourScene("scatter_objects", "rank 0 distributes objects", _only(0, _hand), lambda r, w: [TourCell(f"a{r}", 0)]),
    TourScene("gather_objects", "rank 0 collects an object from each", _words, _only(0, _all_words)),
    TourScene("all_gather_objects", "every rank gets an object from each", _words, _all_words),
    TourScene("send_recv", "from one rank to one other: even ones send, odd ones receive", own(2), _of(_pair, own(2))),
    TourScene("ring", "every rank sends to the next, at the same time", own(2), _of(lambda r, w: (r - 1) % w, own(2))),
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
    """Return (rank, text) for ranks that held other values than expected."""
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
                wanted = [None if cell is None else cell.value for cell in row]
                found.append((rank, f"holds {list(seen)} {when} the call, not {wanted}"))
    return found
