"""Which ranks keep the others waiting, from the phases of all ranks.

A rank waits while it is in a collective. When at least half of the ranks sampled in the same tenth of a second wait,
they wait for the others. While all of them wait, no rank is late: data is being transferred. If ranks form several
groups (pipelines), "half" is a guess.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from phalanx.contract.events import LETTERS, UNSEEN
from phalanx.watch.model.series.strip import TICK

PHASES = {letter: name for name, letter in LETTERS.items()}
# not part of a usual step: a rank in one of these phases is not slow
APART = ("import", "join", "checkpoint", "compile")
_WAITS = LETTERS["collective"]
_WINDOW = 60.0  # seconds that a WaitingTally covers
_ENOUGH = 20.0  # seconds that must have been sampled before a rank is called slow
# share of the time that others wait for a rank: a rank above the first is slow, until it falls below the second
_SLOW, _NOT_SLOW = 0.1, 0.06
_FACTOR = 2.0  # a slow rank has at least this multiple of the median share


@dataclass(frozen=True)
class WaitedFor:
    """How long a rank kept the others waiting."""

    rank: int
    seconds: float
    share: float  # of the sampled time
    phase: str  # the phase it was in most of that time

    def sentence(self, seconds: float = _WINDOW) -> str:
        """Return a sentence about it. `seconds`: the sampled time."""
        within = "the last minute" if round(seconds) == 60 else f"the last {seconds:.0f} s"
        where = {"data": "data loading", "idle": "its own code"}.get(self.phase, self.phase)
        return f"rank {self.rank} kept the others waiting {self.share:.0%} of {within}, mostly in {where}"


@dataclass
class WaitingTally:
    """Which ranks were waited for in the last minute. The cost per second does not depend on the window."""

    _parts: deque[tuple[float, int, dict[int, str]]] = field(default_factory=deque)  # when, ticks, letters by rank
    _counts: dict[int, Counter[str]] = field(default_factory=dict)  # rank -> letters
    _ticks: int = 0
    _slow: set[int] = field(default_factory=set)

    def record(self, now: float, letters: Mapping[int, str]) -> None:
        """Add the letters of all ranks that were sampled just before `now`."""
        ranks, columns = _columns(letters)
        found: dict[int, str] = {}
        for column in columns:
            for place, letter in _late(column):
                found[ranks[place]] = found.get(ranks[place], "") + letter
        for rank, more in found.items():
            self._counts.setdefault(rank, Counter()).update(more)
        self._ticks += len(columns)
        self._parts.append((now, len(columns), found))
        while self._parts and not now - _WINDOW < self._parts[0][0] <= now:
            self._drop(*self._parts.popleft()[1:])
        self._slow = set(self._find_slow(len(ranks)))

    @property
    def seconds(self) -> float:
        """The sampled seconds of the last minute."""
        return self._ticks * TICK

    def clear(self) -> None:
        """Start again."""
        self._parts.clear()
        self._counts.clear()
        self._slow.clear()
        self._ticks = 0

    def ranking(self) -> list[WaitedFor]:
        """Return the ranks that were waited for, the longest first."""
        found = []
        for rank, letters in self._counts.items():
            count = letters.total()
            phase = PHASES.get(max(letters, key=letters.__getitem__), "idle")
            found.append(WaitedFor(rank, round(count * TICK, 1), count / self._ticks if self._ticks else 0.0, phase))
        return sorted(found, key=lambda one: (-one.share, one.rank))

    @property
    def slow(self) -> set[int]:
        """Ranks that keep the others waiting more than chance explains."""
        return self._slow

    def _find_slow(self, ranks: int) -> Iterator[int]:
        if self._ticks * TICK < _ENOUGH:
            return
        ranking = self.ranking()
        median = ranking[ranks // 2].share if ranks // 2 < len(ranking) else 0.0  # of two ranks: the faster one
        for one in ranking:
            least = _NOT_SLOW if one.rank in self._slow else _SLOW
            if one.share >= least and one.share >= _FACTOR * median and one.phase not in APART:
                yield one.rank

    def _drop(self, ticks: int, found: dict[int, str]) -> None:
        self._ticks -= ticks
        for rank, letters in found.items():
            counts = self._counts[rank]
            counts.subtract(letters)
            self._counts[rank] = +counts
            if not self._counts[rank]:
                del self._counts[rank]


def _columns(letters: Mapping[int, str]) -> tuple[list[int], list[str]]:
    """Return the ranks, and one string per tick with a letter per rank. The last ticks of all ranks coincide."""
    size = max(map(len, letters.values()), default=0)
    whole = "".join([each.rjust(size, UNSEEN) for each in letters.values()]).lower()
    return list(letters), [whole[tick::size] for tick in range(size)]


def _late(column: str) -> list[tuple[int, str]]:
    """Return the ranks that are waited for: index in the column, and letter."""
    waiting = column.count(_WAITS)
    others = len(column) - waiting - column.count(UNSEEN)
    if not 0 < others <= waiting:
        return []
    return [(place, letter) for place, letter in enumerate(column) if letter not in (_WAITS, UNSEEN)]
