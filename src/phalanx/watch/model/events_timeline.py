"""What people are told, on the time axis."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import islice

from phalanx.contract import events

KINDS = (
    "joined",
    "fault",
    "recovered",
    "restarted",
    "stalled",
    "verdict",
    "resumed",
    "slow",
    "preempted",
    "note",
    "end",
)
_MOST = 500
_LONG = 2000  # letters


@dataclass(frozen=True)
class TimelineEvent:
    """Something that people are told, on the time axis."""

    time: float
    kind: str  # one of KINDS
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0  # that it took, or lasted


@dataclass
class EventsTimeline:
    """The latest of them, and how many there were."""

    latest: deque[TimelineEvent] = field(default_factory=lambda: deque(maxlen=_MOST))
    counts: Counter[str] = field(default_factory=Counter)  # by kind, of all

    def see(self, event: events.AnyEvent) -> TimelineEvent | None:
        """What is told of it, unless that is known already."""
        told = _happening(event)
        if told is None or self._known(told, event):
            return None
        return self._add(told)

    def tell(self, when: float, kind: str, text: str, ranks: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        self._add(TimelineEvent(when, kind, text, ranks, seconds))

    def since(self, count: int) -> list[TimelineEvent]:
        """Those that came after so many."""
        new = min(self.counts.total() - count, len(self.latest))
        return list(islice(self.latest, len(self.latest) - new, None))

    def _add(self, told: TimelineEvent) -> TimelineEvent:
        self.latest.append(replace(told, text=told.text[:_LONG]))
        self.counts[told.kind] += 1
        return self.latest[-1]

    def _known(self, told: TimelineEvent, event: events.AnyEvent) -> bool:
        text = told.text[:_LONG]
        if isinstance(event, events.Stopping):
            text = event.reason[:_LONG]
        if isinstance(event, events.Stopping | events.WorkerFailed):
            return any(one.kind == "fault" and one.text == text for one in self.latest)
        if told.kind == "note":
            last = self.latest[-1] if self.latest else None
            again = last is not None and last.kind == "note" and last.text == text
            return again or (isinstance(event, events.Note) and event.repeats)
        return False


def _happening(event: events.AnyEvent) -> TimelineEvent | None:
    match event:
        case events.FaultEvent() if event.joins:
            return TimelineEvent(event.time, "joined", event.reason)
        case events.FaultEvent():
            named = event.reason.startswith(("rank ", "node ", "the "))
            text = event.reason if named else f"rank {event.rank}: {event.reason}"
            return TimelineEvent(event.time, "fault", text, (event.rank,))
        case events.WorkerFailed():
            return TimelineEvent(event.time, "fault", event.summary, (event.rank,))
        case events.Recovered():
            again = f"{event.redone} step{'s' if event.redone > 1 else ''} done again"
            cost = again if event.redone > 0 else "no step lost"
            text = f"recovered in {event.seconds:.2f} s: step {event.step} is committed, {cost}"
            return TimelineEvent(event.time, "recovered", text, seconds=event.seconds)
        case events.Restarted():
            text = f"all ranks are started again, {event.seconds:.2f} s after the fault"
            return TimelineEvent(event.time, "restarted", text, seconds=event.seconds)
        case events.Stalled():
            text = f"no rank has gone on for {event.seconds:.0f} s"
            return TimelineEvent(event.time, "stalled", text, seconds=event.seconds)
        case events.VerdictEvent():
            return TimelineEvent(event.time, "verdict", event.text, event.ranks)
        case events.Resumed():
            text = f"goes on after {event.seconds:.0f} s"
            return TimelineEvent(event.time, "resumed", text, seconds=event.seconds)
        case events.Preempted():
            text = f"preempted: step {event.step} is in a checkpoint, {event.seconds:.1f} s after it was asked for"
            return TimelineEvent(event.time, "preempted", text, seconds=event.seconds)
        case events.Stopping():
            return TimelineEvent(event.time, "note", f"ranks are being ended ({event.signal}): {event.reason}")
        case events.StoreLost():
            return TimelineEvent(event.time, "note", f"the store process has ended (code {event.code})")
        case events.Note():
            return TimelineEvent(event.time, "note", event.text)
        case events.RunEnded():
            how = f"ended with code {event.code}" if event.code else "done"
            return TimelineEvent(event.time, "end", f"{how}, after {event.seconds:.0f} s", seconds=event.seconds)
    return None
