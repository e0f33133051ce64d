"""The ranks that keep the others waiting: in the last minute, and in the final report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.contract import events
from phalanx.watch.model.events_timeline import TimelineEvent
from phalanx.watch.model.waiting import WaitedFor, WaitingTally

_AGAIN = 600.0  # seconds until the same rank is reported as slow again


@dataclass
class Stragglers:
    """Finds slow ranks, and reports each of them at intervals."""

    tally: WaitingTally = field(default_factory=WaitingTally)
    _final: set[int] = field(default_factory=set)  # slow ranks of the final report
    _reported: dict[int, float] = field(default_factory=dict)  # rank -> when it was reported as slow

    @property
    def slow(self) -> set[int]:
        """The ranks that are slow."""
        return self.tally.slow | self._final if self._final else self.tally.slow

    def ranking(self) -> list[WaitedFor]:
        """Return the ranks that kept the others waiting in the last minute, the longest first."""
        return self.tally.ranking()

    def apply(self, event: events.AnyEvent) -> list[TimelineEvent]:
        """Fold an event that is not a sample. Return lines for the timeline."""
        match event:
            case events.Stalled() | events.VerdictEvent():
                self.tally.clear()
            case events.FaultEvent() if event.recovery != "stop":
                self.tally.clear()
            case events.StepTimingReport():
                self._final = {one.rank for one in event.slow}
                return [TimelineEvent(event.time, "slow", one.text, (one.rank,)) for one in event.slow]
        return []

    def sampled(self, now: float, letters: Mapping[int, str]) -> TimelineEvent | None:
        """Fold the phases of all ranks. Return one line about all slow ranks, at most every _AGAIN seconds per rank."""
        self.tally.record(now, letters)
        if not any(self._is_new(rank, now) for rank in self.tally.slow):
            return None
        slow = [one for one in self.tally.ranking() if one.rank in self.tally.slow]
        also = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        ranks = tuple(one.rank for one in slow)
        self._reported |= dict.fromkeys(ranks, now)
        return TimelineEvent(now, "slow", slow[0].sentence(self.tally.seconds) + also, ranks, slow[0].seconds)

    def _is_new(self, rank: int, now: float) -> bool:
        return not 0 <= now - self._reported.get(rank, -math.inf) < _AGAIN
