"""What faults and stalls have cost, in seconds, and the goodput.

Goodput is the share of the time since the first step that was not lost. Lost is
- from a fault to the first step that is committed after it (Recovered), and as long as usual for each step done again
- from a fault until all ranks have ended (Restarted), and from there to the next step; which steps are done again after
  that, nobody says
- how long nothing went on (Resumed; without that, from when it began to the next step)
`phalanx run` says at its end how much the faults alone have cost, of the time since the command.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Goodput:
    seconds: float = 0.0  # of what is over; never less than before
    first: float | None = None  # the first step, or the first loss
    since: float | None = None  # of what is not over
    _guess: float = 0.0  # what was counted for the latest, until somebody says how long it took

    def stepped(self, when: float) -> None:
        self.first = when if self.first is None else min(self.first, when)
        self.settle(when)

    def begin(self, when: float) -> None:
        """The first of several that come together counts."""
        if self.since is None:
            self.since, self._guess = when, 0.0
            self.first = when if self.first is None else self.first

    def settle(self, when: float) -> None:
        """It is over, as far as can be seen."""
        if self.since is not None:
            self._guess = max(0.0, when - self.since)
            self.seconds += self._guess
            self.since = None

    def told(self, seconds: float) -> None:
        """It is over, and took so long."""
        self.seconds += max(0.0, seconds - self._guess)
        self.since, self._guess = None, 0.0

    def add(self, seconds: float) -> None:
        self.seconds += max(0.0, seconds)

    def total(self, now: float) -> float:
        return self.seconds + (max(0.0, now - self.since) if self.since is not None else 0.0)

    def goodput(self, now: float) -> float:
        whole = now - self.first if self.first is not None else 0.0
        return min(1.0, max(0.0, 1 - self.total(now) / whole)) if whole > 0 else 1.0
