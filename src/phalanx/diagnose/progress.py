"""Detects stalls: readings of all ranks, once per second -> an Alarm, or none.

A rank makes no progress if it finishes no step, batch or collective. This is an alarm after several usual steps, but
not before `stall_timeout`. A rank that computes in changing places, compiles, writes a checkpoint, imports, or has not
finished its first step gets ten times as long: it is more likely slow. A proven stall gets no extra time: a stopped
process, one whose GIL is held, ranks that all wait. If no rank waits, no rank is blocked: evaluation and inference may
compute for hours, and a parameter server is idle while others train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from phalanx.diagnose.evidence import Phase
from phalanx.diagnose.rank_state import LONGER, SILENT_AFTER

STALL_AFTER = 30.0
AGAIN = 600.0  # seconds after which a lasting stall is reported again
_SEVERAL = 5.0  # times the usual step
_ALL = 2.0  # times the usual step, if all ranks wait: a step may consist of little else
# seconds between two readings that mean that this process was suspended: by Ctrl-Z, or with the whole host
_ASLEEP = 10.0
_LONG = frozenset({"compile", "checkpoint", "import"})


class Reading(msgspec.Struct, frozen=True):
    """The progress and state of a rank at one moment. The leader makes one per rank and second."""

    rank: int
    time: float
    step: int = -1  # the newest finished step; -1: none seen
    progress: int = 0  # completed collectives of all groups
    batches: int = 0  # batches from a DataLoader, as far as seen
    phase: Phase = "idle"
    waiting: bool = False  # in a collective, a receive, or the rendezvous
    silent: float = 0.0  # seconds since it last published anything
    busy: bool = False  # its main thread computes, in changing places
    works: bool = False  # it computes at least occasionally
    state: str = "S"  # as in /proc
    debugged: bool = False
    usual: float = 0.0  # seconds per step; 0: unknown


@dataclass(frozen=True)
class Alarm:
    """A stall that has begun, still lasts, or is over."""

    what: Literal["stall", "again", "resumed"]
    ranks: tuple[int, ...]  # suspects: the late ranks, or all ranks if all wait
    since: float  # when they last made progress
    limit: float  # allowed seconds without progress
    proven: bool = False
    waiting: tuple[int, ...] = ()  # other ranks without progress, which wait


@dataclass
class _Past:
    """The history of one rank."""

    mark: tuple[int, int, int]
    moved: float  # when it last finished a step, a batch or a collective
    eased: float  # when it was last seen in a phase that may take long
    worked: float  # when it was last seen computing
    stepped: bool = False  # its steps have been counted
    met: bool = False  # it has completed a collective, or waited in one


@dataclass
class ProgressWatch:
    """Detects stalls. Call `see` about once per second with all running ranks."""

    stall_timeout: float = STALL_AFTER
    _past: dict[int, _Past] = field(default_factory=dict)
    _alarm: Alarm | None = None
    _marks: dict[int, float] = field(default_factory=dict)  # when each rank of the alarm last made progress
    _reported: float = 0.0
    _idle: float = 0.0  # seconds without progress of any rank, if they have used collectives
    _resting: float = 0.0  # seconds since any rank computed
    _now: float = 0.0  # time of the newest reading: a rank without readings makes no progress

    def see(self, readings: Sequence[Reading]) -> Alarm | None:
        """Add readings of all ranks. Return an alarm if one is due."""
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
        self._reported = now
        if self._alarm is not None:
            self._marks = {rank: self._past[rank].moved for rank in (*self._alarm.ranks, *self._alarm.waiting)}
        return self._alarm

    def _remember(self, alive: list[Reading]) -> None:
        here = {each.rank for each in alive}
        if here != self._past.keys():  # ranks were added or removed: start timing again, unless they hang
            old, self._past = self._past, {}
            for each in alive:
                if each.rank in old:
                    fresh = replace(old[each.rank], moved=each.time, eased=each.time, worked=each.time)
                    self._past[each.rank] = old[each.rank] if self._alarm else fresh
        for each in alive:
            mark = (each.step, each.progress, each.batches)
            past = self._past.get(each.rank)
            if past is None:
                past = self._past[each.rank] = _Past(mark, each.time, each.time, each.time)
            if mark != past.mark:
                past.stepped = past.stepped or each.step > past.mark[0] >= 0
                past.mark, past.moved = mark, each.time
            past.met = past.met or each.waiting or each.progress > 0
            if each.busy or each.phase in _LONG:
                past.eased = each.time
            if each.busy or each.works or each.state == "R":
                past.worked = each.time

    def _ongoing(self, alarm: Alarm, now: float) -> Alarm | None:
        """Return an alarm if the current stall is over, or must be reported again."""
        if any(rank not in self._past for rank in alarm.ranks):
            self._past = {}
        if (
            not self._past
            or any(map(self._moved, alarm.ranks))
            or (alarm.waiting and all(map(self._moved, alarm.waiting)))
        ):
            self._alarm = None
            return Alarm("resumed", alarm.ranks, alarm.since, alarm.limit, alarm.proven)
        if now - self._reported < AGAIN:
            return None
        self._reported = now
        return Alarm("again", alarm.ranks, alarm.since, alarm.limit, alarm.proven)

    def _judge(self, alive: list[Reading], *, alone: bool) -> Alarm | None:
        still = [each for each in alive if self._still(each) >= self.stall_timeout]
        if not still:  # none of the rules below can hold
            return None
        met = any(past.met for past in self._past.values())
        self._idle = self._now - max(past.moved for past in self._past.values()) if met else 0.0
        self._resting = self._now - max(past.worked for past in self._past.values())
        awaited = any(map(_waits, still))
        proven = [each for each in still if self._proven(each, awaited)]
        if proven:
            return self._raise(alive, proven, self.stall_timeout, proven=True)
        if not alone and all(_waits(each) for each in alive):
            limit = max(self.stall_timeout, _ALL * max(each.usual for each in alive))
            if len(still) == len(alive) and all(self._blocked(each) >= limit for each in alive):
                return self._raise(alive, alive, limit, proven=True)
            return None
        late = [each for each in still if self._late(each, awaited)]
        late = [each for each in late if not _waits(each)] or late
        return self._raise(alive, late, max(map(self._limit, late))) if late else None

    def _raise(self, alive: list[Reading], late: list[Reading], limit: float, *, proven: bool = False) -> Alarm:
        ranks = tuple(sorted(each.rank for each in late))
        waiting = (each for each in alive if _waits(each) and self._still(each) >= self.stall_timeout)
        others = tuple(sorted({each.rank for each in waiting} - set(ranks)))
        return Alarm("stall", ranks, max(self._past[rank].moved for rank in ranks), limit, proven, others)

    def _moved(self, rank: int) -> bool:
        """Return whether the rank made progress since the alarm."""
        return rank in self._past and self._past[rank].moved > self._marks[rank]

    def _still(self, reading: Reading) -> float:
        return self._now - self._past[reading.rank].moved

    def _blocked(self, reading: Reading) -> float:
        """Return the seconds without progress since the rank was last seen computing or importing."""
        past = self._past[reading.rank]
        return self._now - max(past.moved, past.eased)

    def _limit(self, reading: Reading) -> float:
        return max(self.stall_timeout, _SEVERAL * reading.usual)

    def _proven(self, reading: Reading, awaited: bool) -> bool:
        if self._still(reading) < self.stall_timeout:
            return False
        if reading.state in ("T", "t"):
            return True
        if reading.silent < self.stall_timeout or reading.phase in _LONG:
            return False
        # Native code may compute while it holds the GIL: before the first step, or while no other rank waits.
        return reading.state != "R" or (awaited and (reading.step >= 0 or reading.progress > 0))

    def _late(self, reading: Reading, awaited: bool) -> bool:
        past, limit = self._past[reading.rank], self._limit(reading)
        if not awaited:
            return self._rests(past, limit)
        if self._still(reading) >= LONGER * limit:
            return True
        # It waits for other ranks, which are judged instead.
        if _waits(reading):
            return False
        # A first step may take long. If steps cannot be seen, assume a first step while it computes.
        if reading.step < 0 and (reading.progress == 0 or reading.state == "R"):
            return False
        return self._blocked(reading) >= limit

    def _rests(self, past: _Past, limit: float) -> bool:
        """Return whether a rank that no other waits for is idle for too long: it had steps, or all ranks are idle."""
        if past.stepped and self._now - max(past.moved, past.eased, past.worked) >= limit:
            return True
        return self._idle >= LONGER * limit and self._resting >= limit


def _waits(reading: Reading) -> bool:
    return reading.waiting and reading.silent < SILENT_AFTER
