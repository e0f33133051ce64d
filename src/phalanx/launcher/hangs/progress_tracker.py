"""Tracks the progress of every rank: from readings of a node's workers to the input of the stall rules."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.diagnose.evidence import Phase, Rank
from phalanx.diagnose.progress import Alarm, ProgressWatch, Reading
from phalanx.diagnose.rank_state import COMPUTES, WAITS

if TYPE_CHECKING:
    from phalanx.launcher.telemetry.node_sampler import WorkerReading

_STEPS = 31  # over which the usual step time is computed
_PLACES = 3  # pieces of code that a rank must be seen in, to count as busy
_MODEL = ("forward", "backward", "optimizer")  # here a moving rank computes, however few places it is seen at
_RECENTLY = 1.5  # seconds


class RankProgress(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The progress of one rank, at one tick."""

    rank: int
    step: int = -1
    progress: int = 0
    phase: Phase = "idle"
    silent: float = 0.0
    busy: bool = False
    state: str = "S"
    debugged: bool = False
    usual: float = 0.0
    batches: int = 0
    works: bool = False

    def reading(self, now: float) -> Reading:
        """Return this as input for the stall rules."""
        return Reading(
            rank=self.rank,
            time=now,
            step=self.step,
            progress=self.progress,
            phase=self.phase,
            waiting=self.phase in WAITS,
            silent=self.silent,
            busy=self.busy,
            state=self.state,
            debugged=self.debugged,
            usual=self.usual,
            batches=self.batches,
            works=self.works,
        )


class ProgressTracker:
    """Tracks one generation of a group: on every node its own ranks, on the leader all of them."""

    def __init__(self, generation: tuple[int, int], stall_timeout: float | None) -> None:
        self.generation = generation  # number of the attempt, and generation within it
        self.began = time.monotonic()
        self.ranks: dict[int, RankProgress] = {}
        self._watch = ProgressWatch(stall_timeout) if stall_timeout is not None else ProgressWatch()
        self._marks: dict[int, tuple[tuple[int, int, int], float]] = {}  # by rank: its progress, and since when
        self._step_times: dict[int, _StepTimes] = {}  # by pid

    def measure(self, reading: WorkerReading, *, debugged: bool) -> RankProgress:
        """Return the progress of a worker of this node."""
        worker, stats, status = reading.worker, reading.stats, reading.status
        if stats is None:
            return RankProgress(rank=worker.seat.rank, state="X")
        bare = RankProgress(rank=worker.seat.rank, state=stats.state, debugged=debugged)
        if status is None:
            return bare
        now, text = time.monotonic(), status.text
        times = self._step_times.setdefault(worker.pid, _StepTimes())
        times.update(status.step, status.stepped)
        moved = now - float(text.get("moved", 0.0)) < _RECENTLY
        varied = text.get("places", 0) >= _PLACES or text.get("phase") in _MODEL
        return replace(
            bare,
            step=status.step or -1,
            progress=sum(max(0, each["enqueued"]) + max(0, each["completed"]) for each in text.get("groups", ())),
            phase=text.get("phase", "idle"),
            silent=round(now - status.looked, 1) if status.looked and not text.get("ending") else 0.0,
            busy=moved and varied and stats.cpu >= COMPUTES,
            usual=times.usual,
            batches=text.get("batches", 0),
            works=stats.cpu >= COMPUTES,
        )

    def update(self, now: float, ranks: list[RankProgress]) -> Alarm | None:
        """Update the progress of all ranks, dead ones included. Return an alarm if they stalled or resumed."""
        self.ranks = {each.rank: each for each in ranks}
        for each in ranks:
            mark, before = (each.step, each.progress, each.batches), self._marks.get(each.rank)
            if before is None or before[0] != mark:
                self._marks[each.rank] = (mark, now)
        return self._watch.see([each.reading(now) for each in ranks])

    def since(self, rank: int) -> float:
        """Return the seconds since a rank last made progress."""
        return time.monotonic() - self._marks[rank][1] if rank in self._marks else 0.0

    @property
    def waited(self) -> float:
        """Return the seconds since any rank last made progress."""
        living = [rank for rank, each in self.ranks.items() if each.state not in ("Z", "X")]
        return min((self.since(rank) for rank in living), default=0.0)

    def complete(self, rank: Rank) -> Rank:
        """Add the observed progress to the evidence of a rank."""
        known = self.ranks.get(rank.rank)
        if known is None:
            return rank
        answered = bool(rank.threads) and not rank.note
        return replace(
            rank,
            step=known.step,
            usual=known.usual,
            phase=known.phase,
            since=round(self.since(rank.rank), 1),
            silent=0.0 if answered else max(rank.silent, known.silent),
            busy=known.busy,
        )


class _StepTimes:
    """Durations of a rank's steps."""

    def __init__(self) -> None:
        self._last = (0, 0.0)
        self._seconds: deque[float] = deque(maxlen=_STEPS)

    def update(self, step: int, when: float) -> None:
        before, then = self._last
        if step > before:
            if before:  # the first step is not typical
                self._seconds.append((when - then) / (step - before))
            self._last = (step, when)

    @property
    def usual(self) -> float:
        return round(median(self._seconds), 4) if self._seconds else 0.0
