"""What was promised of shm beside gloo, MPI and memory itself, judged by the rounds that they had side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from phalanx.bench.comm.cells import Cell, Results
from phalanx.bench.comm.traffic import KIB, MIB, write_size
from phalanx.bench.pairs import more
from phalanx.bench.results import Target

SMALL, LARGE = 64 * KIB, 25 * MIB
OVER_GLOO = 10.0  # times as fast, up to SMALL
LARGE_OVER_GLOO = 2.5
OF_MEMORY = 1.5  # times what memory must take
DDP = 1.5


def targets(results: Results) -> list[Target]:
    """None where shm was not measured."""
    found = []
    for ranks in dict.fromkeys(hello.ranks for hello in results.hellos if len(hello.nodes) == 1):  # of one machine
        own = [cell for cell in results.cells if _is(cell, ranks, "shm")]
        small = [cell for cell in own if cell.size <= SMALL]
        large = [cell for cell in own if cell.size == LARGE]
        upto, at = f"all_reduce up to {write_size(SMALL)}, {ranks} ranks", f"all_reduce of 25 MiB, {ranks} ranks"
        if small:
            found += [
                _faster(f"{upto}: at least 10 times gloo", results, small, "gloo", OVER_GLOO),
                *_mpi(upto, results, small),
            ]
        if large:
            found += [
                _faster(f"{at}: at least 2.5 times gloo", results, large, "gloo", LARGE_OVER_GLOO),
                *_mpi(at, results, large),
                *_of_memory(f"{at}: within 1.5 times of what memory must take", results, large[0]),
            ]
        found += _trained(results, ranks)
    return found


def _is(cell: Cell, ranks: int, backend: str) -> bool:
    return (cell.ranks, cell.operation, cell.backend) == (ranks, "all_reduce", backend) and bool(cell.rounds)


def ratio(one: Cell, other: Cell) -> tuple[float, float]:
    """The one's time by the other's, round by round, and what that may be off by."""
    longer, error = more(list(zip(one.rounds, other.rounds, strict=False)))
    return 1 + longer, error


def _faster(what: str, results: Results, cells: Iterable[Cell], other: str, limit: float) -> Target:
    times = {}
    for cell in cells:
        if beside := results.cell(cell.key, other):
            times[_where(cell)] = 1 / ratio(cell, beside)[0]
    if not times:
        return Target(what, f"{other} was not part of this run", None)
    evidence = ", ".join(f"{where} {factor:.1f}x" for where, factor in times.items())
    return Target(what, evidence, min(times.values()) >= limit)


def _mpi(what: str, results: Results, cells: Sequence[Cell]) -> list[Target]:
    """Through torch.distributed, as shm is; and MPI itself, which has not to pass through it."""
    found = [_not_slower(f"{what}: not slower than mpi", results, cells, "mpi")]
    if any(results.cell(cell.key, "mpi4py") for cell in cells):
        found.append(_not_slower(f"{what}: not slower than MPI called without torch", results, cells, "mpi4py"))
    return found


def _not_slower(what: str, results: Results, cells: Iterable[Cell], other: str) -> Target:
    times = {}
    for cell in cells:
        if beside := results.cell(cell.key, other):
            times[_where(cell)] = ratio(cell, beside)
    if not times:
        return Target(what, f"{other} was not part of this run", None)
    evidence = ", ".join(f"{where} {share:.2f} ± {error:.2f} of its time" for where, (share, error) in times.items())
    if any(share - error > 1 for share, error in times.values()):
        return Target(what, evidence, False)
    if any(share > 1 for share, _ in times.values()):
        return Target(what, f"{evidence}: too close to tell", None)
    return Target(what, evidence, True)


def _of_memory(what: str, results: Results, cell: Cell) -> list[Target]:
    """Of tensors anywhere, and of such as lie in memory that all ranks have mapped."""
    least = results.least(cell)
    if not least:
        return [Target(what, "no copy was measured beside it", None)]
    found = []
    for one, where in ((cell, ""), (results.cell(cell.key, "regions"), ", in memory that all have mapped")):
        if one is not None:
            share = one.seconds / least
            evidence = f"{one.seconds * 1e3:.2f} ms by {least * 1e3:.2f} ms = {share:.2f}"
            found.append(Target(what + where, evidence, share <= OF_MEMORY))
    return found


def _trained(results: Results, ranks: int) -> list[Target]:
    """As DDP is by itself, and as run.wrap lays it out."""
    steps = {one.backend: one for one in results.steps if one.ranks == ranks}
    gloo = steps.get("gloo")
    found = []
    for name, where in (("shm", ""), ("regions", " of run.wrap")):
        own = steps.get(name)
        if own is None:
            continue
        what = f"DDP{where}, 8 × Linear(1024), {ranks} ranks: at least 1.5 times the steps of gloo"
        if gloo is None or not own.rounds or not gloo.rounds:
            why = own.failure or (gloo.failure if gloo else "") or "gloo was not part of this run"
            found.append(Target(what, why, None))
            continue
        times = statistics.median(theirs / ours for ours, theirs in zip(own.rounds, gloo.rounds, strict=False))
        evidence = f"{1 / own.seconds:.1f} by {1 / gloo.seconds:.1f} steps/s, {times:.2f}x"
        found.append(Target(what, evidence, times >= DDP))
    return found


def laggards(results: Results, backend: str, others: Sequence[str]) -> list[str]:
    """Where it is slower than another, by more than noise."""
    found = []
    for cell in results.cells:
        if cell.backend != backend or not cell.rounds:
            continue
        for other in others:
            beside = results.cell(cell.key, other)
            if beside is not None and other != backend:
                share, error = ratio(cell, beside)
                if share - error > 1:
                    found.append(f"{cell.operation} {_where(cell)}, {cell.ranks} ranks: {share:.2f} of {other}'s time")
    return found


def _where(cell: Cell) -> str:
    return write_size(cell.size) + ("" if cell.dtype == "float32" else f" {cell.dtype}")
