"""The progress that ranks report, and the recovery times computed from it. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WARM_UP = 2  # first steps of a group, which are slower


@dataclass(frozen=True)
class ProgressRecord:
    """One line that a rank has written."""

    what: str  # met: first collective done; ready: state restored; step: a step is committed
    rank: int
    pid: int
    group: int  # generation of the process group
    step: int
    time: float
    cpu: float = 0.0  # CPU seconds of its process so far


def parse(text: str) -> list[ProgressRecord]:
    """Parse lines of `what rank pid group step time cpu`."""
    rows = (line.split() for line in text.splitlines() if line)
    return [
        ProgressRecord(what, int(rank), int(pid), int(group), int(step), float(time), float(cpu))
        for what, rank, pid, group, step, time, cpu in rows
    ]


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that the benchmark has sent."""

    rank: int
    pid: int
    group: int
    time: float


@dataclass(frozen=True)
class RecoveryTimes:
    """Seconds from a kill until the last rank had reached each point; for `first`, the first rank."""

    first: float  # the next step is committed by any rank
    whole: float  # every rank has committed a step, the replacement too
    met: float | None  # all have finished a collective
    ready: float | None  # all have restored their state
    lost: int  # steps that survivors had committed and that were repeated


def recovery_times(records: Iterable[ProgressRecord], kill: Kill, ranks: int) -> RecoveryTimes | None:
    """Return the times after a kill, or None while it is not complete."""
    later = [record for record in records if record.time >= kill.time and record.group != kill.group]
    steps = [record for record in later if record.what == "step"]
    back = {record.rank for record in steps}
    if len(back) < ranks or not any(record.rank == kill.rank and record.pid != kill.pid for record in steps):
        return None
    old = [
        record.step
        for record in records
        if (record.what, record.group) == ("step", kill.group) and record.rank != kill.rank and record.pid != kill.pid
    ]
    begin = min(record.step for record in steps)
    return RecoveryTimes(
        first=round(min(record.time for record in steps) - kill.time, 4),
        whole=round(_last(steps, kill.time), 4),
        met=_reached(later, "met", kill.time),
        ready=_reached(later, "ready", kill.time),
        lost=max(0, max(old, default=0) - begin + 1),
    )


def _reached(records: Sequence[ProgressRecord], what: str, begin: float) -> float | None:
    chosen = [record for record in records if record.what == what]
    return round(_last(chosen, begin), 4) if chosen else None


def _last(records: Sequence[ProgressRecord], begin: float) -> float:
    """Seconds until the last rank had written such a record for the first time."""
    times: dict[int, float] = {}
    for record in records:
        times[record.rank] = min(record.time, times.get(record.rank, record.time))
    return max(times.values()) - begin


def settled_group(records: Iterable[ProgressRecord], ranks: int, steps: int) -> int | None:
    """Return the last group once all `ranks` ranks have committed `steps` steps in it, else None."""
    records = [record for record in records if record.what == "step"]
    if not records:
        return None
    group = records[-1].group
    counts: dict[int, int] = {}
    for record in records:
        if record.group == group:
            counts[record.rank] = counts.get(record.rank, 0) + 1
    return group if len(counts) == ranks and min(counts.values()) >= steps else None


def step_times(records: Iterable[ProgressRecord]) -> list[float]:
    """Return the durations of undisturbed steps on the lowest rank, without the first steps of each group."""
    records = list(records)
    times: dict[tuple[int, int], list[float]] = {}
    for record in records:
        if record.what == "step":
            times.setdefault((record.group, record.rank), []).append(record.time)
    lowest = min((rank for _, rank in times), default=0)
    return [
        after - before
        for (_, rank), each in times.items()
        if rank == lowest
        for before, after in zip(each[_WARM_UP:], each[_WARM_UP + 1 :], strict=False)
    ]


def newest_step(records: Iterable[ProgressRecord], until: float) -> int:
    """Return the last step that any rank had committed at the time `until`."""
    return max((record.step for record in records if record.what == "step" and record.time < until), default=0)


def cpu_seconds(records: Sequence[ProgressRecord], before: Mapping[int, float]) -> float:
    """Return the CPU seconds that all ranks have used since `before` (by rank)."""
    latest = {record.rank: record.cpu for record in records}
    return sum(cpu - before.get(rank, cpu) for rank, cpu in latest.items())
