"""The events that viewers show as a list."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import islice

from phalanx.contract import events
from phalanx.watch.model.status import STOPPED

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
_LONGEST = 2000  # characters


@dataclass(frozen=True)
class TimelineEvent:
    """One line of the list."""

    time: float
    kind: str  # one of KINDS
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0  # how long it took


@dataclass
class EventsTimeline:
    """The latest events, and how many there were of each kind."""

    latest: deque[TimelineEvent] = field(default_factory=lambda: deque(maxlen=_MOST))
    counts: Counter[str] = field(default_factory=Counter)  # by kind, of all

    def apply(self, event: events.AnyEvent) -> TimelineEvent | None:
        """Add `event` and return its line; None if there is nothing to show, or if it is already shown."""
        entry = _entry(event)
        if entry is None or self._known(entry, event):
            return None
        return self.add(entry)

    def add(self, entry: TimelineEvent) -> TimelineEvent:
        """Add a line, and return it as it is shown."""
        self.latest.append(replace(entry, text=entry.text[:_LONGEST]))
        self.counts[entry.kind] += 1
        return self.latest[-1]

    def since(self, count: int) -> list[TimelineEvent]:
        """Return the lines after the first `count`, as far as they are stored."""
        new = min(self.counts.total() - count, len(self.latest))
        return list(islice(self.latest, len(self.latest) - new, None))

    def _known(self, entry: TimelineEvent, event: events.AnyEvent) -> bool:
        text = entry.text[:_LONGEST]
        if isinstance(event, events.Stopping):
            text = event.reason[:_LONGEST]
        if isinstance(event, events.Stopping | events.WorkerFailed):
            return any(one.kind == "fault" and one.text == text for one in self.latest)
        if entry.kind == "note":
            last = self.latest[-1] if self.latest else None
            again = last is not None and last.kind == "note" and last.text == text
            return again or (isinstance(event, events.NoteEvent) and event.repeats)
        return False


def joined(before: events.RendezvousProgress | None, event: events.RendezvousProgress) -> TimelineEvent | None:
    """Return the line about nodes that have joined since `before`; None if there are none."""
    known = before.joined if before is not None else event.joined[:1]
    new = list((Counter(event.joined) - Counter(known)).elements())  # two nodes may have the same name
    if not new:
        return None
    shown = ", ".join(new[:4]) + (f" and {len(new) - 4} more" if len(new) > 4 else "")
    return TimelineEvent(event.time, "joined", f"{shown}: {len(event.joined)} of {event.expected} nodes joined")


def _entry(event: events.AnyEvent) -> TimelineEvent | None:
    match event:
        case events.FaultEvent(kind="node-joined"):
            return TimelineEvent(event.time, "joined", event.reason)
        case events.FaultEvent():
            return TimelineEvent(event.time, "fault", event.reason, (event.rank,))
        case events.WorkerFailed():
            return TimelineEvent(event.time, "fault", event.summary, (event.rank,))
        case events.Recovered():
            again = f"{event.redone} step{'s' if event.redone > 1 else ''} done again"
            cost = again if event.redone > 0 else "no step lost"
            text = f"recovered in {event.seconds:.2f} s: step {event.step} is committed, {cost}"
            return TimelineEvent(event.time, "recovered", text, seconds=event.seconds)
        case events.Restarted():
            text = f"all ranks restarted {event.seconds:.2f} s after the fault"
            return TimelineEvent(event.time, "restarted", text, seconds=event.seconds)
        case events.BatchSkipped():
            return TimelineEvent(event.time, "fault", f"{event.reason}; its batch was skipped", seconds=event.seconds)
        case events.Stalled():
            text = f"no progress for {event.seconds:.0f} s"
            return TimelineEvent(event.time, "stalled", text, seconds=event.seconds)
        case events.VerdictEvent():
            return TimelineEvent(event.time, "verdict", event.text, event.ranks)
        case events.Resumed():
            text = f"resumed after {event.seconds:.0f} s"
            return TimelineEvent(event.time, "resumed", text, seconds=event.seconds)
        case events.Preempted():
            text = f"preempted: step {event.step} is in a checkpoint, {event.seconds:.1f} s after the signal"
            return TimelineEvent(event.time, "preempted", text, seconds=event.seconds)
        case events.Stopping():
            return TimelineEvent(event.time, "note", f"stopping all ranks ({event.signal}): {event.reason}")
        case events.StoreLost():
            return TimelineEvent(event.time, "note", f"the store process has ended (code {event.code})")
        case events.NoteEvent():
            return TimelineEvent(event.time, "note", event.text)
        case events.RunEnded():
            known = "preempted" if event.preempted else STOPPED.get(event.code)
            how = known or (f"failed with exit code {event.code}" if event.code else "done")
            return TimelineEvent(event.time, "end", f"{how}, after {event.seconds:.0f} s", seconds=event.seconds)
    return None
