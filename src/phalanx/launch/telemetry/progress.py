"""What is seen of every rank twice a second, and how that goes on: from pages and the kernel to readings."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.diagnose.evidence import Phase, Rank
from phalanx.diagnose.progress import Alarm, ProgressWatch, Reading
from phalanx.diagnose.rank_state import COMPUTES

if TYPE_CHECKING:
    from phalanx.launch.agent.worker import Worker
    from phalanx.launch.telemetry.process_stats import ProcessStats

_STEPS = 31  # that say what is usual
_PLACES = 3  # pieces of code that it must be seen in, to count as busy
_MODEL = ("forward", "backward", "optimizer")  # whoever moves in there computes, however few places it is seen at
_LATELY = 1.5  # seconds
_WAITS = ("collective", "join")


class ProgressLook(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """At one rank."""

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
        return Reading(
            rank=self.rank,
            time=now,
            step=self.step,
            progress=self.progress,
            phase=self.phase,
            waiting=self.phase in _WAITS,
            silent=self.silent,
            busy=self.busy,
            state=self.state,
            debugged=self.debugged,
            usual=self.usual,
            batches=self.batches,
            works=self.works,
        )


class ProgressTracker:
    """One generation of a group: what one node looks at, and what node 0 makes of the looks of all."""

    def __init__(self, of: tuple[int, int], after: float | None) -> None:
        self.of = of
        self.began = time.monotonic()
        self.looks: dict[int, ProgressLook] = {}
        self._watch = ProgressWatch(after) if after is not None else ProgressWatch()
        self._marks: dict[int, tuple[tuple[int, int, int], float]] = {}  # of every rank: how far, and since when
        self._paces: dict[int, _Pace] = {}  # by process

    def look(self, worker: Worker, pulse: ProcessStats, *, debugged: bool) -> ProgressLook:
        bare = ProgressLook(rank=worker.seat.rank, state=pulse.state, debugged=debugged)
        if worker.probe is None:
            return bare
        page, now = worker.probe.page, time.monotonic()
        text = page.text
        pace = self._paces.setdefault(worker.pid, _Pace())
        pace.see(page.step, page.stepped)
        lately = now - float(text.get("moved", 0.0)) < _LATELY
        elsewhere = text.get("places", 0) >= _PLACES or text.get("phase") in _MODEL
        return replace(
            bare,
            step=page.step or -1,
            progress=sum(max(0, each["enqueued"]) + max(0, each["completed"]) for each in text.get("groups", ())),
            phase=text.get("phase", "idle"),
            silent=round(now - page.looked, 1) if page.looked and not text.get("ending") else 0.0,
            busy=lately and elsewhere and pulse.cpu >= COMPUTES,
            usual=pace.usual,
            batches=text.get("batches", 0),
            works=pulse.cpu >= COMPUTES,
        )

    def see(self, now: float, looks: list[ProgressLook]) -> Alarm | None:
        """At node 0: of all ranks, the dead ones too."""
        self.looks = {look.rank: look for look in looks}
        for look in looks:
            mark = (look.step, look.progress, look.batches)
            if self._marks.get(look.rank, ((-2, 0, 0), 0.0))[0] != mark:
                self._marks[look.rank] = (mark, now)
        return self._watch.see([look.reading(now) for look in looks])

    def since(self, rank: int) -> float:
        """Seconds without progress of a rank."""
        return time.monotonic() - self._marks[rank][1] if rank in self._marks else 0.0

    @property
    def waited(self) -> float:
        """Seconds without progress of any."""
        living = [rank for rank, look in self.looks.items() if look.state not in ("Z", "X")]
        return min((self.since(rank) for rank in living), default=0.0)

    def complete(self, rank: Rank) -> Rank:
        """What was seen of it before it was asked."""
        look = self.looks.get(rank.rank)
        if look is None:
            return rank
        return replace(
            rank,
            step=look.step,
            usual=look.usual,
            phase=look.phase,
            since=round(self.since(rank.rank), 1),
            silent=max(rank.silent, look.silent) if rank.note or not rank.threads else 0.0,  # else it has answered
            busy=look.busy,
        )


class _Pace:
    """How long the steps of a rank take."""

    def __init__(self) -> None:
        self._last = (0, 0.0)
        self._seconds: deque[float] = deque(maxlen=_STEPS)

    def see(self, step: int, when: float) -> None:
        before, then = self._last
        if step > before:
            if before:  # the first one says nothing
                self._seconds.append((when - then) / (step - before))
            self._last = (step, when)

    @property
    def usual(self) -> float:
        return round(median(self._seconds), 4) if self._seconds else 0.0
