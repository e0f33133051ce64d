"""Who waits for whom, from the phases of all ranks.

A rank waits while it is in a collective. When at least half of the ranks that were seen in the same tenth of a second
wait, those that do not are waited for. While all of them wait, nobody is: the data is on its way. Where ranks form
several groups (pipelines), the half is a guess.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from phalanx.contract.events import LETTERS, UNSEEN
from phalanx.watch.model.strip import TICK, Strip

PHASES = {letter: name for name, letter in LETTERS.items()}
APART = ("import", "join", "checkpoint", "compile")  # not part of a usual step: who is in it is not slow
_WAITS = LETTERS["collective"]
_WINDOW = 60.0  # seconds that a Tally looks back
_SURE = 20.0  # seconds that it must have seen
_SLOW, _WELL = 0.1, 0.06  # share of the time that others wait for a rank that is slow, and for one not any more
_FACTOR = 2.0  # times as much as the rank in the middle


@dataclass(frozen=True)
class Stretch:
    """Somebody is waited for."""

    start: float
    end: float
    waiting: tuple[int, ...]  # ranks, when it ended
    on: tuple[int, ...]  # for those


@dataclass(frozen=True)
class WaitedFor:
    """How long a rank kept the others waiting."""

    rank: int
    seconds: float
    share: float  # of the time that was looked at
    phase: str  # that it was in, mostly
    steps: int = 0  # that it made meanwhile; 0: unknown

    @property
    def each(self) -> float:
        """Seconds a step; without steps 0."""
        return self.seconds / self.steps if self.steps else 0.0

    def sentence(self, seconds: float = _WINDOW) -> str:
        """Of the last so many."""
        within = "the last minute" if round(seconds) == 60 else f"the last {seconds:.0f} s"
        where = {"data": "data loading", "idle": "code of its own"}.get(self.phase, self.phase)
        return f"rank {self.rank} kept the others waiting {self.share:.0%} of {within}, mostly in {where}"


def stretches(strips: Mapping[int, Strip], start: float, end: float) -> list[Stretch]:
    """In order. A stretch ends when somebody else is waited for."""
    ranks, columns = _columns({rank: strip.between(start, end) for rank, strip in strips.items()})
    first = end - TICK * len(columns)
    found: list[Stretch] = []
    last = -1
    for number, column in enumerate(columns):
        on = tuple(ranks[place] for place, _ in _late(column))
        if not on:
            continue
        waiting = tuple(rank for rank, letter in zip(ranks, column, strict=True) if letter == _WAITS)
        if found and last == number - 1 and found[-1].on == on:
            found[-1] = Stretch(found[-1].start, first + TICK * (number + 1), waiting, on)
        else:
            found.append(Stretch(first + TICK * number, first + TICK * (number + 1), waiting, on))
        last = number
    return found


def held(strips: Mapping[int, Strip], start: float, end: float) -> list[WaitedFor]:
    """Of that time: who was waited for, the longest first."""
    letters = {rank: strip.between(start, end) for rank, strip in strips.items()}
    ranks, columns = _columns(letters)
    seen: dict[int, Counter[str]] = {}
    for column in columns:
        for place, letter in _late(column):
            seen.setdefault(ranks[place], Counter())[letter] += 1
    steps = {rank: sum(map(str.isupper, letters[rank])) for rank in seen}
    return _ordered(seen, len(columns), steps)


@dataclass
class Tally:
    """The same of the last minute, second by second: cheap, however many ranks there are."""

    _parts: deque[tuple[float, int, dict[int, str]]] = field(default_factory=deque)  # when, ticks, letters by rank
    _seen: dict[int, Counter[str]] = field(default_factory=dict)
    _ticks: int = 0
    _slow: set[int] = field(default_factory=set)

    def see(self, now: float, letters: Mapping[int, str]) -> None:
        ranks, columns = _columns(letters)
        found: dict[int, str] = {}
        for column in columns:
            for place, letter in _late(column):
                found[ranks[place]] = found.get(ranks[place], "") + letter
        for rank, more in found.items():
            self._seen.setdefault(rank, Counter()).update(more)
        self._ticks += len(columns)
        self._parts.append((now, len(columns), found))
        while self._parts and not now - _WINDOW < self._parts[0][0] <= now:
            self._forget(*self._parts.popleft()[1:])
        self._slow = set(self._late_ones(len(ranks)))

    @property
    def seconds(self) -> float:
        """That it has seen of the last minute."""
        return self._ticks * TICK

    def clear(self) -> None:
        self._parts.clear()
        self._seen.clear()
        self._slow.clear()
        self._ticks = 0

    def held(self) -> list[WaitedFor]:
        return _ordered(self._seen, self._ticks, {})

    @property
    def slow(self) -> set[int]:
        """Ranks that hold the others up all the time, beyond what chance does to everybody."""
        return self._slow

    def _late_ones(self, ranks: int) -> Iterator[int]:
        if self._ticks * TICK < _SURE:
            return
        every = self.held()
        usual = every[ranks // 2].share if ranks // 2 < len(every) else 0.0  # of two, the one that is faster
        for one in every:
            enough = _WELL if one.rank in self._slow else _SLOW
            if one.share >= enough and one.share >= _FACTOR * usual and one.phase not in APART:
                yield one.rank

    def _forget(self, ticks: int, found: dict[int, str]) -> None:
        self._ticks -= ticks
        for rank, letters in found.items():
            left = self._seen[rank]
            left.subtract(letters)
            self._seen[rank] = +left
            if not self._seen[rank]:
                del self._seen[rank]


def _columns(letters: Mapping[int, str]) -> tuple[list[int], list[str]]:
    """The ranks, and what they were all in, tick by tick; the last ticks are the same for all."""
    size = max(map(len, letters.values()), default=0)
    whole = "".join([each.rjust(size, UNSEEN) for each in letters.values()]).lower()
    return list(letters), [whole[tick::size] for tick in range(size)]


def _late(column: str) -> list[tuple[int, str]]:
    """Who is waited for: place in the column, and letter."""
    waiting = column.count(_WAITS)
    others = len(column) - waiting - column.count(UNSEEN)
    if not 0 < others <= waiting:
        return []
    return [(place, letter) for place, letter in enumerate(column) if letter not in (_WAITS, UNSEEN)]


def _ordered(seen: Mapping[int, Counter[str]], ticks: int, steps: Mapping[int, int]) -> list[WaitedFor]:
    every = []
    for rank, letters in seen.items():
        count = letters.total()
        phase = PHASES.get(max(letters, key=letters.__getitem__), "idle")
        every.append(
            WaitedFor(rank, round(count * TICK, 1), count / ticks if ticks else 0.0, phase, steps.get(rank, 0))
        )
    return sorted(every, key=lambda one: (-one.share, one.rank))
