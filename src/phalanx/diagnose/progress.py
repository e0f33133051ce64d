"""When to raise the alarm: what each rank shows once a second -> an Alarm, or none.

Standing still is what does not finish a step, a batch or a collective. It is an alarm after several usual steps, and
not before `stall_timeout`. What computes at ever other places, or compiles, writes a checkpoint, imports, or has not
done its first step yet, has ten times as long: it is more likely slow. What is proven needs no such patience: a stopped
process, one whose Python's lock is held, ranks that all wait. Where nobody waits, nobody is kept: evaluation and
inference may compute for hours, and a parameter server rests while others train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.diagnose.evidence import Phase
from phalanx.diagnose.rank_state import LONGER, UNHEARD

STALL_AFTER = 30.0
AGAIN = 600.0  # seconds after which a lasting stall is reported again
_SEVERAL = 5.0  # usual steps
_ALL = 2.0  # usual steps, if all wait: a step may consist of little else
_ASLEEP = 10.0  # seconds between two looks: it was we who stood still, by Ctrl-Z or with the whole machine
_LONG = frozenset({"compile", "checkpoint", "import"})


@dataclass(frozen=True)
class Reading:
    """What a rank shows of itself."""

    rank: int
    time: float
    step: int = -1  # the newest that it has finished; -1: none that could be seen
    progress: int = 0  # collectives that it has completed, of all groups together
    batches: int = 0  # that a DataLoader has given it, as far as could be seen
    phase: Phase = "idle"
    waiting: bool = False  # in a collective, for a message, or where all ranks meet
    silent: float = 0.0  # seconds since it last published anything
    busy: bool = False  # its main thread computes, and is seen at ever other places
    works: bool = False  # it computes, be it only now and then
    state: str = "S"  # as the kernel has it
    debugged: bool = False
    usual: float = 0.0  # seconds of a step; 0: not known


@dataclass(frozen=True)
class Alarm:
    """A stall that has begun, still lasts, or is over."""

    what: Literal["stall", "again", "resumed"]
    ranks: tuple[int, ...]  # who is suspected: the late ones, or all that wait
    since: float  # when they last made progress
    limit: float  # seconds that were granted
    proven: bool = False
    waiting: tuple[int, ...] = ()  # who else stood still, and waited


@dataclass
class _Past:
    """What is remembered of one rank."""

    mark: tuple[int, int, int]
    moved: float  # when it last finished a step, a batch or a collective
    eased: float  # when it was last seen at what may take long
    worked: float  # when it was last seen to compute
    stepped: bool = False  # its steps have been counted
    met: bool = False  # it has done a collective, or waited in one


@dataclass
class ProgressWatch:
    """Detects stalls. Call `see` about once per second with all running ranks."""

    stall_timeout: float = STALL_AFTER
    _past: dict[int, _Past] = field(default_factory=dict)
    _alarm: Alarm | None = None
    _marks: dict[int, float] = field(default_factory=dict)  # of the alarm: when each of its ranks had last moved
    _told: float = 0.0
    _idle: float = 0.0  # seconds without progress of any of them, if they belong together
    _resting: float = 0.0  # seconds in which none of them has computed
    _now: float = 0.0  # of the newest reading: who does not tell any more does not go on either

    def see(self, readings: Sequence[Reading]) -> Alarm | None:
        """Add readings of all ranks. Returns an alarm if one is due."""
        alive = [each for each in readings if each.state not in ("Z", "X")]
        self._remember(alive)
        if not alive:
            return None
        before, self._now = self._now, max(each.time for each in alive)
        now, debugged = self._now, any(each.debugged for each in alive)
        if self._alarm is None and (debugged or (before and now - before > _ASLEEP)):
            for past in self._past.values():
                past.moved = now
        if debugged:
            return None
        if self._alarm is not None:
            return self._ongoing(self._alarm, now)
        self._alarm = self._judge(alive, alone=len(readings) < 2)
        self._told = now
        if self._alarm is not None:
            self._marks = {rank: self._past[rank].moved for rank in (*self._alarm.ranks, *self._alarm.waiting)}
        return self._alarm

    def _remember(self, alive: list[Reading]) -> None:
        here = {each.rank for each in alive}
        if here != set(self._past):  # ranks were added or removed: the time starts again, unless they hang
            old, self._past = self._past, {}
            for each in alive:
                if each.rank in old:
                    fresh = replace(old[each.rank], moved=each.time, eased=each.time, worked=each.time)
                    self._past[each.rank] = old[each.rank] if self._alarm else fresh
        for each in alive:
            mark = (each.step, each.progress, each.batches)
            past = self._past.setdefault(each.rank, _Past(mark, each.time, each.time, each.time))
            if mark != past.mark:
                past.stepped = past.stepped or each.step > past.mark[0] >= 0
                past.mark, past.moved = mark, each.time
            past.met = past.met or each.waiting or each.progress > 0
            if each.busy or each.phase in _LONG:
                past.eased = each.time
            if each.busy or each.works or each.state == "R":
                past.worked = each.time

    def _ongoing(self, alarm: Alarm, now: float) -> Alarm | None:
        """Return an alarm if the current stall is over, or is to be repeated."""
        if any(rank not in self._past for rank in alarm.ranks):
            self._past = {}
        if (
            not self._past
            or any(map(self._moved, alarm.ranks))
            or (alarm.waiting and all(map(self._moved, alarm.waiting)))
        ):
            self._alarm = None
            return Alarm("resumed", alarm.ranks, alarm.since, alarm.limit, alarm.proven)
        if now - self._told < AGAIN:
            return None
        self._told = now
        return Alarm("again", alarm.ranks, alarm.since, alarm.limit, alarm.proven)

    def _judge(self, alive: list[Reading], *, alone: bool) -> Alarm | None:
        met = any(past.met for past in self._past.values())
        self._idle = self._now - max(past.moved for past in self._past.values()) if met else 0.0
        self._resting = self._now - max(past.worked for past in self._past.values())
        awaited = any(_waits(each) and self._still(each) >= self.stall_timeout for each in alive)
        proven = [each for each in alive if self._proven(each, awaited)]
        if proven:
            return self._raise(alive, proven, self.stall_timeout, proven=True)
        if not alone and all(_waits(each) for each in alive):
            limit = max(self.stall_timeout, _ALL * max(each.usual for each in alive))
            if all(self._still(each) >= limit for each in alive):
                return self._raise(alive, alive, limit, proven=True)
            return None
        late = [each for each in alive if self._late(each, awaited)]
        late = [each for each in late if not _waits(each)] or late
        return self._raise(alive, late, max(map(self._limit, late))) if late else None

    def _raise(self, alive: list[Reading], late: list[Reading], limit: float, *, proven: bool = False) -> Alarm:
        ranks = tuple(sorted(each.rank for each in late))
        waiting = (each for each in alive if _waits(each) and self._still(each) >= self.stall_timeout)
        others = tuple(sorted({each.rank for each in waiting} - set(ranks)))
        return Alarm("stall", ranks, max(self._past[rank].moved for rank in ranks), limit, proven, others)

    def _moved(self, rank: int) -> bool:
        """Return whether there was progress since the alarm."""
        return rank in self._past and self._past[rank].moved > self._marks[rank]

    def _still(self, reading: Reading) -> float:
        return self._now - self._past[reading.rank].moved

    def _limit(self, reading: Reading) -> float:
        return max(self.stall_timeout, _SEVERAL * reading.usual)

    def _proven(self, reading: Reading, awaited: bool) -> bool:
        if self._still(reading) < self.stall_timeout:
            return False
        if reading.state in ("T", "t"):
            return True
        if reading.silent < self.stall_timeout or reading.phase in _LONG:
            return False
        # Native code that computes with Python's lock: a file that is read before the first step, or nobody waits.
        return reading.state != "R" or (awaited and (reading.step >= 0 or reading.progress > 0))

    def _late(self, reading: Reading, awaited: bool) -> bool:
        past, limit = self._past[reading.rank], self._limit(reading)
        if not awaited:
            return self._rests(past, limit)
        if self._still(reading) >= LONGER * limit:
            return True
        # It waits for others, and they are asked.
        if _waits(reading):
            return False
        # A first step takes its time. Where steps cannot be seen, it is one if it computes.
        if reading.step < 0 and (reading.progress == 0 or reading.state == "R"):
            return False
        return self._now - max(past.moved, past.eased) >= limit

    def _rests(self, past: _Past, limit: float) -> bool:
        """Nobody is kept by it. What had a pace has lost it, if it does nothing; and where ranks that belong together
        all do nothing, a first step may be what does not end."""
        if past.stepped and self._now - max(past.moved, past.eased, past.worked) >= limit:
            return True
        return self._idle >= LONGER * limit and self._resting >= limit


def _waits(reading: Reading) -> bool:
    return reading.waiting and reading.silent < UNHEARD
