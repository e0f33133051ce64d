"""What people are told, on the time axis."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice

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
class Happening:
    """Something that people are told, on the time axis."""

    time: float
    kind: str  # one of KINDS
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0  # that it took, or lasted


@dataclass
class Story:
    """The latest of them, and how many there were."""

    latest: deque[Happening] = field(default_factory=lambda: deque(maxlen=_MOST))
    counts: Counter[str] = field(default_factory=Counter)  # by kind, of all

    def tell(self, when: float, kind: str, text: str, ranks: tuple[int, ...] = (), seconds: float = 0.0) -> Happening:
        told = Happening(when, kind, text[:_LONG], ranks, seconds)
        self.latest.append(told)
        self.counts[kind] += 1
        return told

    def note(self, when: float, text: str) -> None:
        """Once, however often it is said in a row."""
        if not (self.latest and self.latest[-1].kind == "note" and self.latest[-1].text == text[:_LONG]):
            self.tell(when, "note", text)

    def has(self, kind: str, text: str) -> bool:
        return any(one.kind == kind and one.text == text[:_LONG] for one in self.latest)

    def since(self, count: int) -> list[Happening]:
        """Those that came after so many."""
        new = min(self.counts.total() - count, len(self.latest))
        return list(islice(self.latest, len(self.latest) - new, None))
