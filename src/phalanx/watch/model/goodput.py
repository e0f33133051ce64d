"""The time lost to faults and stalls, and the goodput.

Goodput is the share of the time since the first step that was not lost. Lost time is:

- from a fault to the first committed step after it (Recovered), plus the usual time of each step computed again;
- from a fault until all ranks have ended (Restarted), and from there to the next step. The number of steps computed
  again after a restart is not known;
- a step whose update was not finite and was dropped (BatchSkipped);
- a stall (Resumed; without that event, from its begin to the next step).

A loss begins with the last committed step before the fault, regardless of when the fault is detected. `phalanx run`
counts in the same way. Once it reports its result (GoodputMeasured), all views show that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Goodput:
    """Sums up lost time. A loss begins with `begin` and ends with `end` or `end_after`."""

    seconds: float = 0.0  # of completed losses; never decreases
    first: float | None = None  # time of the first step, or of the first loss
    since: float | None = None  # begin of the current loss
    measured: tuple[float, float] | None = None  # lost seconds and seconds since the first step, at the end of the run
    _estimate: float = 0.0  # what `end` has counted for the latest loss, until its real duration is known

    def stepped(self, when: float) -> None:
        """Record a step: the current loss is over."""
        self.first = when if self.first is None else min(self.first, when)
        self.end(when)

    def begin(self, when: float) -> None:
        """Begin a loss. Does nothing if one has already begun."""
        if self.since is None:
            self.since, self._estimate = when, 0.0
            self.first = when if self.first is None else self.first

    def end(self, when: float) -> None:
        """End the current loss at `when`, as an estimate."""
        if self.since is not None:
            self._estimate = max(0.0, when - self.since)
            self.seconds += self._estimate
            self.since = None

    def end_after(self, seconds: float) -> None:
        """End the current loss, or correct the last one: it took `seconds`."""
        self.seconds += max(0.0, seconds - self._estimate)
        self.since, self._estimate = None, 0.0

    def add(self, seconds: float) -> None:
        """Count `seconds` as lost."""
        self.seconds += max(0.0, seconds)

    def total(self, now: float) -> float:
        """Return the seconds lost until `now`, with those of the current loss."""
        if self.measured is not None:
            return self.measured[0]
        return self.seconds + (max(0.0, now - self.since) if self.since is not None else 0.0)

    def goodput(self, now: float) -> float:
        """Return the goodput until `now`, 0 to 1."""
        whole = now - self.first if self.first is not None else 0.0
        if self.measured is not None:
            whole = self.measured[1]
        return min(1.0, max(0.0, 1 - self.total(now) / whole)) if whole > 0 else 1.0
