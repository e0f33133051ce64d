"""Stalls and faults: the current verdicts, the root cause of a failure, and the time lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.contract import events
from phalanx.watch.model.events_timeline import TimelineEvent
from phalanx.watch.model.goodput import Goodput

_MOST_VERDICTS = 20


@dataclass
class RunProblems:
    """What went wrong in a run, and the time that cost. Call `apply` with each event."""

    verdicts: list[TimelineEvent] = field(default_factory=list)  # current ones
    cause: TimelineEvent | None = None  # root cause of the failure: the first worker that failed
    lost_time: Goodput = field(default_factory=Goodput)
    since: float = -math.inf  # time of the latest fault, stall or restart
    _furthest: int | None = None  # highest step of the previous sample since then
    _stalls: bool = False  # the run is or was stalled, and no fault has resulted from it

    @property
    def stuck(self) -> set[int]:
        """The ranks that current verdicts name."""
        return {rank for verdict in self.verdicts for rank in verdict.ranks}

    def apply(self, event: events.AnyEvent, entry: TimelineEvent | None, *, stalled: bool, step_seconds: float) -> None:
        """Fold an event.

        `entry` is its line of the timeline, `stalled` the state of the run before it, `step_seconds` the usual time
        of a step.
        """
        match event:
            case events.Stalled() | events.VerdictEvent() | events.Resumed():
                self._stall(event, entry)
            case events.FaultEvent() if event.recovery != "stop":
                self._stalls = False
                if stalled and not event.idle:
                    self.lost_time.end(event.time)
                self.lost_time.begin(event.time - max(0.0, event.idle))
                self._begin(event.time)
            case events.Recovered():
                self.lost_time.end_after(event.seconds + max(0.0, event.idle))
                self.lost_time.add(max(0, event.redone) * step_seconds)
                self.verdicts.clear()
            case events.Restarted():
                self.lost_time.end_after(event.seconds + max(0.0, event.idle))
                self.lost_time.begin(event.time)
                self.verdicts.clear()
            case events.BatchSkipped():
                self.lost_time.add(event.seconds)
            case events.GoodputMeasured():
                self.lost_time.measured = max(0.0, event.lost), max(0.0, event.seconds)
            case events.WorkerFailed():
                self.cause = TimelineEvent(event.time, "fault", event.summary, (event.rank,))
            case events.AttemptStarted():
                self.verdicts.clear()
                self._begin(event.time)
            case events.RunEnded():
                self.lost_time.end(event.time)

    def sampled(self, now: float, furthest: int) -> bool:
        """Fold the highest step of a sample. Return whether a step was made since the latest problem.

        A sample that is older than the problem does not end it.
        """
        if furthest >= 0 and self.lost_time.first is None:
            self.lost_time.first = now
        if now < self.since:
            return False
        before, self._furthest = self._furthest, furthest
        return before is not None and furthest > before

    def stepped(self, when: float) -> None:
        """Record a step: any problem is over."""
        self.verdicts.clear()
        self.lost_time.stepped(when)

    def _stall(self, event: events.Stalled | events.VerdictEvent | events.Resumed, entry: TimelineEvent | None) -> None:
        match event:
            case events.Stalled():
                self._stalls = True
                self.verdicts.clear()  # new ones follow
                self.lost_time.begin(event.time - max(0.0, event.seconds))
                self._begin(event.time)
            case events.VerdictEvent():
                self.lost_time.begin(event.time)
                self._begin(event.time)
                self.verdicts += [entry] if entry is not None else []
                del self.verdicts[:-_MOST_VERDICTS]
            case events.Resumed():
                self.verdicts.clear()
                if self._stalls:  # otherwise it is part of the time lost to a fault
                    self.lost_time.end_after(event.seconds)
                self._stalls = False

    def _begin(self, when: float) -> None:
        self._furthest, self.since = None, when
