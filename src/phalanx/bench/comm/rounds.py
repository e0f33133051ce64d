"""Measures one task: backends take turns, in an order that turns, as often as the time allows; results are checked.

As in nccl-tests: all meet, then calls follow each other without a pause; the slowest rank's mean is the time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from phalanx.bench.comm import calls, everybody, traffic
from phalanx.bench.comm.calls import Buffers, Call, Copying, Party, Task
from phalanx.bench.comm.cells import Cell
from phalanx.bench.launch import rotated

MOST = 2000  # calls of a round
_WARM = 3
_SMALL = 1 << 20  # bytes up to which every round is checked
_SLOW = 0.15  # seconds of a call from which on there are two rounds

_Told = tuple[list[float], float, float, int, str]


@dataclass
class _Turns:
    """How it goes for one backend."""

    party: Party
    task: Task
    buffers: Buffers
    call: Call
    means: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    calls: int = 0
    each: float = 0.0  # seconds, as the slowest rank has estimated them
    wrong: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Pace:
    rounds: int
    seconds: float


class Rounds:
    """`broken`: backends that some ranks could not go on with, and others could; nobody knows what they are at."""

    def __init__(self, parties: Sequence[Party], pace: Pace) -> None:
        self._parties = list(parties)
        self._pace = pace
        self.broken: dict[str, str] = {}

    def measure(self, task: Task, buffers: Callable[[torch.device], Buffers], copying: Sequence[Copying]) -> list[Cell]:
        """Of all backends, and what copying takes beside them. Every rank must call it; all get the same."""
        turns: list[_Turns] = []
        for party in (*self._parties, *copying):
            of = Task(traffic.COPY, task.dtype, "out", task.size) if isinstance(party, Copying) else task
            if party.name in self.broken:
                continue
            own = party.place(of, buffers(party.device).cut(of.operation, of.size, of.dtype))
            call = party.call(of, own)
            if call is not None:
                turns.append(_Turns(party, of, own, call))
        for number in range(self._pace.rounds):
            for name in rotated([turn.party.name for turn in turns], number):
                turn = next(turn for turn in turns if turn.party.name == name)
                if not turn.failure and len(turn.means) < self._rounds(turn):
                    self._round(turn)
        return [self._cell(turn) for turn in turns]

    def _rounds(self, turn: _Turns) -> int:
        most = 1 if turn.each > 5 * _SLOW else 2 if turn.each > _SLOW else self._pace.rounds
        return min(self._pace.rounds, most)

    def _round(self, turn: _Turns) -> None:
        party, call = turn.party, turn.call
        failure, once, met = "", 0.0, False
        if not turn.means or turn.buffers.bytes <= _SMALL:
            try:
                calls.fill(turn.task, turn.buffers)
                party.meet()
                met = True
                once = _once(party, call)
                turn.wrong += calls.wrong(turn.task, turn.buffers)
            except Exception as error:
                failure = calls.first_line(error)
                if not met:  # of no use any more
                    self.broken[party.name] = failure
            if not turn.means:
                self._agree(turn, once, failure)
                if not turn.failure and turn.each < _SLOW:
                    self._estimate(turn)
            elif failure:
                turn.failure = self.broken[party.name] = failure
        if turn.failure:
            return
        number = int(min(MOST, max(1, self._pace.seconds / max(turn.each, 1e-7))))
        gc.disable()
        try:
            if turn.each < _SLOW:
                for _ in range(min(number, _WARM)):
                    call()
            party.meet()
            mean, times = _timed(party, call, number)
        except Exception as error:
            turn.failure = self.broken[party.name] = calls.first_line(error)
            return
        finally:
            gc.enable()
        half = 2 if turn.task.operation == "pingpong" else 1
        turn.means.append(mean / half)
        turn.times += [seconds / half for seconds in times]
        turn.calls += number

    def _estimate(self, turn: _Turns) -> None:
        """Without what the first call alone takes. Whether there is time for it, all have agreed on before."""
        once, failure = 0.0, ""
        try:
            turn.party.meet()
            once = min(_once(turn.party, turn.call) for _ in range(_WARM))
        except Exception as error:
            failure = calls.first_line(error)
        self._agree(turn, once, failure)

    def _agree(self, turn: _Turns, once: float, failure: str) -> None:
        """On how long it takes, and whether it works: all must do as much as the others."""
        told = torch.tensor([once, float(bool(failure)), float(not failure)], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        turn.each = told[0].item()
        if told[1].item():
            turn.failure = failure or "another rank could not"
            if told[2].item():  # it went well in some ranks
                self.broken[turn.party.name] = turn.failure

    def _cell(self, turn: _Turns) -> Cell:
        """The slowest rank's, of everybody's."""
        mine = (turn.means, _at(turn.times, 0.5), _at(turn.times, 0.99), turn.wrong, turn.failure)
        ranks: list[_Told] = everybody.told(mine, _Told)
        failure = next((one[4] for one in ranks if one[4]), "")
        return Cell(
            ranks=dist.get_world_size(),
            operation=turn.task.operation,
            dtype=turn.task.dtype,
            place=turn.task.place,
            size=turn.task.size,
            bytes=turn.buffers.bytes if turn.task.size else 0,
            backend=turn.party.name,
            rounds=() if failure else tuple(map(max, zip(*(one[0] for one in ranks), strict=True))),
            p50=max(one[1] for one in ranks),
            p99=max(one[2] for one in ranks),
            calls=turn.calls,
            wrong=sum(one[3] for one in ranks),
            failure=failure,
        )


def _once(party: Party, call: Call) -> float:
    begin = time.perf_counter()
    call()
    party.settle()
    return time.perf_counter() - begin


def _timed(party: Party, call: Call, number: int) -> tuple[float, list[float]]:
    """The mean time of a call, and each."""
    if party.device.type == "cuda":
        return _timed_on_gpu(party, call, number)
    clock = time.perf_counter
    stamps = [clock()]
    stamp = stamps.append
    for _ in range(number):
        call()
        stamp(clock())
    return (stamps[-1] - stamps[0]) / number, [after - before for before, after in pairwise(stamps)]


def _timed_on_gpu(party: Party, call: Call, number: int) -> tuple[float, list[float]]:
    """By the GPU's own clock, for calls only ask for work; by the wall's as a whole."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    begin = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    party.settle()
    mean = (time.perf_counter() - begin) / number
    return mean, [one.elapsed_time(next_) / 1000 for one, next_ in pairwise(events)]


def _at(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
