"""Targets of shm, compared with gloo, MPI and memory in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.comm.results import CommResults, Measurement
from benchmarks.comm.traffic import KIB, MIB, format_size
from benchmarks.common.ratios import relative_difference
from benchmarks.common.targets import Target

SMALL, LARGE = 64 * KIB, 25 * MIB
OVER_GLOO = 10.0  # times as fast, up to SMALL
LARGE_OVER_GLOO = 2.5
OF_MEMORY = 1.5  # times the least time of memory
DDP = 1.5


def targets(results: CommResults) -> list[Target]:
    """Judge the targets of every number of ranks; none if shm was not measured."""
    found = []
    for ranks in dict.fromkeys(world.ranks for world in results.worlds if len(world.nodes) == 1):  # on one machine
        own = [measurement for measurement in results.measurements if _is(measurement, ranks, "shm")]
        small = [measurement for measurement in own if measurement.size <= SMALL]
        large = [measurement for measurement in own if measurement.size == LARGE]
        upto, at = f"all_reduce up to {format_size(SMALL)}, {ranks} ranks", f"all_reduce of 25 MiB, {ranks} ranks"
        if small:
            found += [
                _faster(f"{upto}: at least 10 times gloo", results, small, "gloo", OVER_GLOO),
                *_mpi(upto, results, small),
            ]
        if large:
            found += [
                _faster(f"{at}: at least 2.5 times gloo", results, large, "gloo", LARGE_OVER_GLOO),
                *_mpi(at, results, large),
                *_of_memory(f"{at}: within 1.5 times the least time of memory", results, large[0]),
            ]
        found += _trained(results, ranks)
    return found


def _is(measurement: Measurement, ranks: int, backend: str) -> bool:
    return (measurement.ranks, measurement.operation, measurement.backend) == (ranks, "all_reduce", backend) and bool(
        measurement.rounds
    )


def ratio(one: Measurement, other: Measurement) -> tuple[float, float]:
    """Return the time of one measurement relative to another, round by round, and its error."""
    longer, error = relative_difference(list(zip(one.rounds, other.rounds, strict=False)))
    return 1 + longer, error


def _faster(what: str, results: CommResults, measurements: Iterable[Measurement], other: str, limit: float) -> Target:
    times = {}
    for measurement in measurements:
        if reference := results.find(measurement.key, other):
            times[_where(measurement)] = 1 / ratio(measurement, reference)[0]
    if not times:
        return Target(what, f"{other} was not part of this run", None)
    evidence = ", ".join(f"{where} {factor:.1f}x" for where, factor in times.items())
    return Target(what, evidence, min(times.values()) >= limit)


def _mpi(what: str, results: CommResults, measurements: Sequence[Measurement]) -> list[Target]:
    """Compare with MPI as a backend of torch.distributed, as shm is, and with MPI called directly."""
    found = [_not_slower(f"{what}: not slower than mpi", results, measurements, "mpi")]
    if any(results.find(measurement.key, "mpi4py") for measurement in measurements):
        found.append(_not_slower(f"{what}: not slower than MPI called without torch", results, measurements, "mpi4py"))
    return found


def _not_slower(what: str, results: CommResults, measurements: Iterable[Measurement], other: str) -> Target:
    times = {}
    for measurement in measurements:
        if reference := results.find(measurement.key, other):
            times[_where(measurement)] = ratio(measurement, reference)
    if not times:
        return Target(what, f"{other} was not part of this run", None)
    evidence = ", ".join(f"{where} {share:.2f} ± {error:.2f} of its time" for where, (share, error) in times.items())
    if any(share - error > 1 for share, error in times.values()):
        return Target(what, evidence, False)
    if any(share > 1 for share, _ in times.values()):
        return Target(what, f"{evidence}: too close to tell", None)
    return Target(what, evidence, True)


def _of_memory(what: str, results: CommResults, measurement: Measurement) -> list[Target]:
    """Compare with a memory copy: tensors anywhere, and tensors in memory that all ranks have mapped."""
    least = results.least(measurement)
    if not least:
        return [Target(what, "no copy was measured", None)]
    found = []
    for one, where in (
        (measurement, ""),
        (results.find(measurement.key, "regions"), ", in memory that all ranks have mapped"),
    ):
        if one is not None:
            share = one.seconds / least
            evidence = f"{one.seconds * 1e3:.2f} ms / {least * 1e3:.2f} ms = {share:.2f}"
            found.append(Target(what + where, evidence, share <= OF_MEMORY))
    return found


def _trained(results: CommResults, ranks: int) -> list[Target]:
    """Compare DDP steps: as DDP places its buckets, and as run.wrap does."""
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
        evidence = f"{1 / own.seconds:.1f} and {1 / gloo.seconds:.1f} steps/s, {times:.2f}x"
        found.append(Target(what, evidence, times >= DDP))
    return found


def slower_cases(results: CommResults, backend: str, others: Sequence[str]) -> list[str]:
    """Describe where a backend is slower than another by more than the noise."""
    found = []
    for measurement in results.measurements:
        if measurement.backend != backend or not measurement.rounds:
            continue
        for other in others:
            reference = results.find(measurement.key, other)
            if reference is not None and other != backend:
                share, error = ratio(measurement, reference)
                if share - error > 1:
                    case = f"{measurement.operation} {_where(measurement)}, {measurement.ranks} ranks"
                    found.append(f"{case}: {share:.2f} of {other}'s time")
    return found


def _where(measurement: Measurement) -> str:
    return format_size(measurement.size) + ("" if measurement.dtype == "float32" else f" {measurement.dtype}")
