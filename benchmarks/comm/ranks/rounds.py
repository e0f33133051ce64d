"""Measures one task: backends take turns in an order that rotates, and their results are verified.

As in nccl-tests, all ranks meet, then calls follow each other without a pause; the time is the slowest rank's mean.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks.comm import traffic
from benchmarks.comm.ranks import verification
from benchmarks.comm.ranks.backends import Backend, CopyBackend
from benchmarks.comm.ranks.exchange import all_gather_json, first_line
from benchmarks.comm.ranks.operations import Buffers, Call, Task
from benchmarks.comm.results import Measurement
from benchmarks.common.ratios import rotated

MAX_CALLS = 2000  # per round
_WARM_UP = 3  # calls
_SMALL = 1 << 20  # bytes up to which every round is verified, else only the first
_SLOW = 0.15  # seconds; slower calls are measured in two rounds

_RankTimes = tuple[list[float], float, float, int, str]


@dataclass
class _Turns:
    """The state of one backend in a measurement."""

    backend: Backend
    task: Task
    buffers: Buffers
    call: Call
    means: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    calls: int = 0
    each: float = 0.0  # seconds per call, as the slowest rank estimates them
    wrong: int = 0
    failure: str = ""


@dataclass(frozen=True)
class RoundSettings:
    """How many rounds, and how long each is."""

    rounds: int
    seconds: float


class RoundRunner:
    """Measures tasks. `broken` has backends that failed on some ranks, so that their state is unknown."""

    def __init__(self, backends: Sequence[Backend], settings: RoundSettings) -> None:
        self._backends = list(backends)
        self._settings = settings
        self.broken: dict[str, str] = {}

    def measure(
        self, task: Task, buffers: Callable[[torch.device], Buffers], copies: Sequence[CopyBackend]
    ) -> list[Measurement]:
        """Measure a task with all backends, and memory copies. Every rank must call it; all get the same result."""
        turns: list[_Turns] = []
        for backend in (*self._backends, *copies):
            of = Task(traffic.COPY, task.dtype, "out", task.size) if isinstance(backend, CopyBackend) else task
            if backend.name in self.broken:
                continue
            own = backend.place(of, buffers(backend.device).cut(of.operation, of.size, of.dtype))
            call = backend.call(of, own)
            if call is not None:
                turns.append(_Turns(backend, of, own, call))
        for number in range(self._settings.rounds):
            for name in rotated([turn.backend.name for turn in turns], number):
                turn = next(turn for turn in turns if turn.backend.name == name)
                if not turn.failure and len(turn.means) < self._rounds(turn):
                    self._round(turn)
        return [self._measurement(turn) for turn in turns]

    def _rounds(self, turn: _Turns) -> int:
        most = 1 if turn.each > 5 * _SLOW else 2 if turn.each > _SLOW else self._settings.rounds
        return min(self._settings.rounds, most)

    def _round(self, turn: _Turns) -> None:
        backend, call = turn.backend, turn.call
        failure, once, met = "", 0.0, False
        if not turn.means or turn.buffers.bytes <= _SMALL:
            try:
                verification.fill(turn.task, turn.buffers)
                backend.meet()
                met = True
                once = _once(backend, call)
                turn.wrong += verification.count_wrong(turn.task, turn.buffers)
            except Exception as error:
                failure = first_line(error)
                if not met:  # unusable from now on
                    self.broken[backend.name] = failure
            if not turn.means:
                self._agree(turn, once, failure)
                if not turn.failure and turn.each < _SLOW:
                    self._estimate(turn)
            elif failure:
                turn.failure = self.broken[backend.name] = failure
        if turn.failure:
            return
        number = int(min(MAX_CALLS, max(1, self._settings.seconds / max(turn.each, 1e-7))))
        gc.disable()
        try:
            if turn.each < _SLOW:
                for _ in range(min(number, _WARM_UP)):
                    call()
            backend.meet()
            mean, times = _timed(backend, call, number)
        except Exception as error:
            turn.failure = self.broken[backend.name] = first_line(error)
            return
        finally:
            gc.enable()
        half = 2 if turn.task.operation == "pingpong" else 1
        turn.means.append(mean / half)
        turn.times += [seconds / half for seconds in times]
        turn.calls += number

    def _estimate(self, turn: _Turns) -> None:
        """Estimate the time of a call without the cost of the first. All ranks have agreed to do this."""
        once, failure = 0.0, ""
        try:
            turn.backend.meet()
            once = min(_once(turn.backend, turn.call) for _ in range(_WARM_UP))
        except Exception as error:
            failure = first_line(error)
        self._agree(turn, once, failure)

    def _agree(self, turn: _Turns, once: float, failure: str) -> None:
        """Agree on the time of a call and on failures: all ranks must make the same number of calls."""
        agreed = torch.tensor([once, float(bool(failure)), float(not failure)], dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        turn.each = agreed[0].item()
        if agreed[1].item():
            turn.failure = failure or "it failed on another rank"
            if agreed[2].item():  # it succeeded on some ranks
                self.broken[turn.backend.name] = turn.failure

    def _measurement(self, turn: _Turns) -> Measurement:
        """Combine the times of all ranks: the slowest counts."""
        mine = (turn.means, _at(turn.times, 0.5), _at(turn.times, 0.99), turn.wrong, turn.failure)
        ranks: list[_RankTimes] = all_gather_json(mine, _RankTimes)
        failure = next((one[4] for one in ranks if one[4]), "")
        return Measurement(
            ranks=dist.get_world_size(),
            operation=turn.task.operation,
            dtype=turn.task.dtype,
            place=turn.task.place,
            size=turn.task.size,
            bytes=turn.buffers.bytes if turn.task.size else 0,
            backend=turn.backend.name,
            rounds=() if failure else tuple(map(max, zip(*(one[0] for one in ranks), strict=True))),
            p50=max(one[1] for one in ranks),
            p99=max(one[2] for one in ranks),
            calls=turn.calls,
            wrong=sum(one[3] for one in ranks),
            failure=failure,
        )


def _once(backend: Backend, call: Call) -> float:
    begin = time.perf_counter()
    call()
    backend.settle()
    return time.perf_counter() - begin


def _timed(backend: Backend, call: Call, number: int) -> tuple[float, list[float]]:
    """Return the mean time of a call, and the time of each."""
    if backend.device.type == "cuda":
        return _timed_on_gpu(backend, call, number)
    clock = time.perf_counter
    stamps = [clock()]
    stamp = stamps.append
    for _ in range(number):
        call()
        stamp(clock())
    return (stamps[-1] - stamps[0]) / number, [after - before for before, after in pairwise(stamps)]


def _timed_on_gpu(backend: Backend, call: Call, number: int) -> tuple[float, list[float]]:
    """Time each call with CUDA events, because calls are asynchronous; and all of them with the wall clock."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    begin = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    backend.settle()
    mean = (time.perf_counter() - begin) / number
    return mean, [one.elapsed_time(next_) / 1000 for one, next_ in pairwise(events)]


def _at(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
