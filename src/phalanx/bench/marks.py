"""How far a training is, as its ranks tell it, and what that says about a kill. Pure: no process, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_WARMING = 2  # steps of a group that are slower than those that follow


@dataclass(frozen=True)
class Mark:
    what: str  # met: the first collective is through; ready: everything is made and filled; step: one is committed
    rank: int
    pid: int
    group: int  # another number for every group that forms
    step: int
    time: float
    cpu: float = 0.0  # seconds that its process has spent so far


def parsed(text: str) -> list[Mark]:
    """Lines of `what rank pid group step time cpu`."""
    rows = (line.split() for line in text.splitlines() if line)
    return [
        Mark(what, int(rank), int(pid), int(group), int(step), float(time), float(cpu))
        for what, rank, pid, group, step, time, cpu in rows
    ]


@dataclass(frozen=True)
class Kill:
    rank: int
    pid: int
    group: int
    time: float


@dataclass(frozen=True)
class Recovery:
    """Seconds from a kill, each until the last rank was there, but for `first`."""

    first: float  # a step is committed by a group without the dead process, whoever is in it
    whole: float  # every rank has committed a step since, the one in its place too
    met: float | None  # all have met in a collective
    ready: float | None  # all have their state
    lost: int  # steps that survivors had committed, and that were done again


def recovery(marks: Iterable[Mark], kill: Kill, ranks: int) -> Recovery | None:
    """None: it is not over yet."""
    later = [mark for mark in marks if mark.time >= kill.time and mark.group != kill.group]
    steps = [mark for mark in later if mark.what == "step"]
    back = {mark.rank for mark in steps}
    if len(back) < ranks or not any(mark.rank == kill.rank and mark.pid != kill.pid for mark in steps):
        return None
    old = [
        mark.step
        for mark in marks
        if (mark.what, mark.group) == ("step", kill.group) and mark.rank != kill.rank and mark.pid != kill.pid
    ]
    begin = min(mark.step for mark in steps)
    return Recovery(
        first=round(min(mark.time for mark in steps) - kill.time, 4),
        whole=round(_last(steps, kill.time), 4),
        met=_reached(later, "met", kill.time),
        ready=_reached(later, "ready", kill.time),
        lost=max(0, max(old, default=0) - begin + 1),
    )


def _reached(marks: Sequence[Mark], what: str, begin: float) -> float | None:
    chosen = [mark for mark in marks if mark.what == what]
    return round(_last(chosen, begin), 4) if chosen else None


def _last(marks: Sequence[Mark], begin: float) -> float:
    """Until the last rank had come there for the first time."""
    times: dict[int, float] = {}
    for mark in marks:
        times[mark.rank] = min(mark.time, times.get(mark.rank, mark.time))
    return max(times.values()) - begin


def settled(marks: Iterable[Mark], ranks: int, steps: int) -> int | None:
    """The newest group, once each of its ranks, and no rank less, has committed so many steps in it."""
    marks = [mark for mark in marks if mark.what == "step"]
    if not marks:
        return None
    group = marks[-1].group
    counts: dict[int, int] = {}
    for mark in marks:
        if mark.group == group:
            counts[mark.rank] = counts.get(mark.rank, 0) + 1
    return group if len(counts) == ranks and min(counts.values()) >= steps else None


def step_times(marks: Iterable[Mark]) -> list[float]:
    """Of steps that nothing disturbed: as the first rank that is there has them, without the first ones of a group."""
    marks = list(marks)
    times: dict[tuple[int, int], list[float]] = {}
    for mark in marks:
        if mark.what == "step":
            times.setdefault((mark.group, mark.rank), []).append(mark.time)
    lowest = min((rank for _, rank in times), default=0)
    return [
        after - before
        for (_, rank), each in times.items()
        if rank == lowest
        for before, after in zip(each[_WARMING:], each[_WARMING + 1 :], strict=False)
    ]


def newest(marks: Iterable[Mark], until: float) -> int:
    """The newest step that any rank had committed by then."""
    return max((mark.step for mark in marks if mark.what == "step" and mark.time < until), default=0)


def spent(marks: Sequence[Mark], before: Mapping[int, float]) -> float:
    """CPU seconds of all ranks together, since each had spent what it had before."""
    latest = {mark.rank: mark.cpu for mark in marks}
    return sum(cpu - before.get(rank, cpu) for rank, cpu in latest.items())


def median(numbers: Sequence[float]) -> float | None:
    return statistics.median(numbers) if numbers else None
