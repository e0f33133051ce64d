"""How long a dismissed host waits until it gets ranks again. Pure.

Such a node costs the others two regroups each time. Some supervisors start it again at once, and it fails again.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY = 10.0  # seconds; doubled with each dismissal
LONGEST_DELAY = 600.0


@dataclass
class Dismissals:
    """The dismissals of one host."""

    count: int = 0
    latest: float = 0.0  # monotonic time
    why: str = ""

    @property
    def delay(self) -> float:
        """Return the seconds from the latest dismissal until it gets ranks again."""
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (self.count - 1)) if self.count else 0.0


class Readmission:
    """Records the hosts that had ranks and were dismissed, for the whole run."""

    def __init__(self) -> None:
        self._hosts: dict[str, Dismissals] = {}

    def dismissed(self, host: str, now: float, why: str) -> None:
        """Record a dismissal."""
        found = self._hosts.setdefault(host, Dismissals())
        found.count, found.latest, found.why = found.count + 1, now, why

    def remaining(self, host: str, now: float) -> float:
        """Return the seconds until a node on this host may get ranks."""
        found = self._hosts.get(host, Dismissals())
        return max(0.0, found.latest + found.delay - now) if found.count else 0.0

    def note(self, host: str, now: float) -> str:
        """Return the message for a node on this host when it joins. Empty: it was never dismissed."""
        if host not in self._hosts:
            return ""
        wait = self.remaining(host, now)
        when = f"; it gets ranks in {wait:.0f} s at the earliest" if wait else ""
        return f"this host was dismissed before: {self._hosts[host].why}{when}"
