"""When to raise the alarm: what each rank shows once a second -> an Alarm, or none.

Standing still is what does not finish a step or a collective. It is an alarm after several usual steps, and not before
`stall_after`. What computes at ever other places, or compiles, writes a checkpoint, imports, or has not done its first
step yet, has ten times as long: it is more likely slow. What is proven needs no such patience: a stopped process, one
whose Python's lock is held, ranks that all wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from phalanx.diagnose.evidence import Phase
from phalanx.diagnose.standing import LONGER, UNHEARD

STALL_AFTER = 30.0
AGAIN = 600.0  # seconds after which a stall that lasts is told again
_SEVERAL = 5.0  # usual steps
_ALL = 2.0  # usual steps, if all wait: a step may consist of little else
_LONG = frozenset({"compile", "checkpoint", "import"})


@dataclass(frozen=True)
class Reading:
    """What a rank shows of itself."""

    rank: int
    time: float
    step: int = -1  # the newest that it has finished; -1: none that could be seen
    progress: int = 0  # collectives that it has completed, of all groups together
    phase: Phase = "idle"
    waiting: bool = False  # in a collective, for a message, or where all ranks meet
    silent: float = 0.0  # seconds since it last published anything
    busy: bool = False  # its main thread computes, and is seen at ever other places
    state: str = "S"  # as the kernel has it
    debugged: bool = False
    usual: float = 0.0  # seconds of a step; 0: not known


@dataclass(frozen=True)
class Alarm:
    what: Literal["stall", "again", "resumed"]
    ranks: tuple[int, ...]  # who is suspected: the late ones, or all that wait
    since: float  # when they last made progress
    limit: float  # seconds that were granted
    proven: bool = False


@dataclass
class _Past:
    """Of one rank."""

    mark: tuple[int, int]
    moved: float  # when it last finished a step or a collective
    eased: float  # when it was last seen at what may take long
    stepped: bool = False  # its steps have been counted
    met: bool = False  # it has done a collective, or waited in one


@dataclass
class Watch:
    """`see` is called about once a second, with all ranks that run."""

    stall_after: float = STALL_AFTER
    _past: dict[int, _Past] = field(default_factory=dict)
    _alarm: Alarm | None = None
    _told: float = 0.0
    _now: float = 0.0  # of the newest reading: who does not tell any more does not go on either

    def see(self, readings: Sequence[Reading]) -> Alarm | None:
        alive = [each for each in readings if each.state not in ("Z", "X")]
        self._remember(alive)
        if not alive:
            return None
        self._now = now = max(each.time for each in alive)
        if any(each.debugged for each in alive):
            for past in self._past.values():
                past.moved = now
            return None
        if self._alarm is not None:
            return self._standing(self._alarm, now)
        self._alarm = self._judge(alive, alone=len(readings) < 2)
        self._told = now
        return self._alarm

    def _remember(self, alive: list[Reading]) -> None:
        if {each.rank for each in alive} != set(self._past):
            self._past = {}  # somebody has come or gone: a new company has its full time
        for each in alive:
            mark = (each.step, each.progress)
            past = self._past.setdefault(each.rank, _Past(mark, each.time, each.time))
            if mark != past.mark:
                past.stepped = past.stepped or each.step > past.mark[0] >= 0
                past.mark, past.moved = mark, each.time
            past.met = past.met or each.waiting or each.progress > 0
            if each.busy or each.phase in _LONG:
                past.eased = each.time

    def _standing(self, alarm: Alarm, now: float) -> Alarm | None:
        """There has been one: has it ended, or is it time to say it again?"""
        gone = any(rank not in self._past for rank in alarm.ranks)
        if gone or any(self._past[rank].moved > alarm.since for rank in alarm.ranks):
            self._alarm = None
            return Alarm("resumed", alarm.ranks, alarm.since, alarm.limit, alarm.proven)
        if now - self._told < AGAIN:
            return None
        self._told = now
        return Alarm("again", alarm.ranks, alarm.since, alarm.limit, alarm.proven)

    def _judge(self, alive: list[Reading], *, alone: bool) -> Alarm | None:
        proven = [each for each in alive if self._proven(each)]
        if proven:
            return self._raise(proven, self.stall_after, proven=True)
        if not alone and all(_waits(each) for each in alive):
            limit = max(self.stall_after, _ALL * max(each.usual for each in alive))
            if all(self._still(each) >= limit for each in alive):
                return self._raise(alive, limit, proven=True)
            return None
        awaited = any(_waits(each) for each in alive)
        late = [each for each in alive if self._late(each, awaited)]
        late = [each for each in late if not _waits(each)] or late
        return self._raise(late, max(map(self._limit, late))) if late else None

    def _raise(self, late: list[Reading], limit: float, *, proven: bool = False) -> Alarm:
        ranks = tuple(sorted(each.rank for each in late))
        return Alarm("stall", ranks, max(self._past[rank].moved for rank in ranks), limit, proven)

    def _still(self, reading: Reading) -> float:
        return self._now - self._past[reading.rank].moved

    def _limit(self, reading: Reading) -> float:
        return max(self.stall_after, _SEVERAL * reading.usual)

    def _proven(self, reading: Reading) -> bool:
        if self._still(reading) < self.stall_after:
            return False
        if reading.state in ("T", "t"):
            return True
        return reading.silent >= self.stall_after and reading.phase not in _LONG

    def _late(self, reading: Reading, awaited: bool) -> bool:
        past, limit = self._past[reading.rank], self._limit(reading)
        if not any(each.met for each in self._past.values()):
            # Ranks that have nothing to do with each other: only what had a pace can lose it.
            rests = not reading.busy and reading.state != "R"
            return past.stepped and rests and self._now - max(past.moved, past.eased) >= limit
        if self._still(reading) >= LONGER * limit:
            return True
        # It waits for others, and they are asked.
        if _waits(reading):
            return False
        # A first step takes its time. Where steps cannot be seen, it is one if it computes, or nobody waits.
        if reading.step < 0 and (reading.progress == 0 or reading.state == "R" or not awaited):
            return False
        return self._now - max(past.moved, past.eased) >= limit


def _waits(reading: Reading) -> bool:
    return reading.waiting and reading.silent < UNHEARD
