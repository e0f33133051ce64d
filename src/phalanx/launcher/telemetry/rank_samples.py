"""Turns readings of a node's workers into one sample per rank, once per second."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.contract.events import LETTERS, UNSEEN, NodeRanks, RankInfo, RankSample
from phalanx.forkserver.board.status_slot import PHASES, RING, SlotLook
from phalanx.launcher.telemetry.node_sampler import TENTHS, NodeReading, WorkerReading

if TYPE_CHECKING:
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.worker_group import WorkerGroup

_LONGEST = RING - 4  # tenths of a second that a status slot stores
_HOLDS = 0.25  # seconds for which a look is valid: the next one may be slightly late
_GPU_BUSY = 0.02  # of its time
_SILENT = 0.5  # seconds: shorter silences are not reported
_WINDOW = 5.0  # seconds over which samples per second are averaged
_LETTERS = tuple(LETTERS[phase] for phase in PHASES)
_DATA, _WAITING, _OTHER = "d", "wj", "ikcs"  # the remaining phases count as compute, as they do for stragglers
_OWN = LETTERS["idle"]


def letters(looks: Sequence[SlotLook], first: int, last: int, ahead: float, before: SlotLook | None = None) -> str:
    """Return one letter per tenth of a second from `first` up to, not including, `last`, by the wall clock.

    `ahead` is how far the wall clock is ahead of the clock of the looks, `before` the look that precedes them.
    """
    found: list[str] = []
    at, known = 0, before
    for tick in range(first, last):
        begins, ends = tick / TENTHS - ahead, (tick + 1) / TENTHS - ahead
        stepped = False
        while at < len(looks) and looks[at].time < ends:
            stepped = stepped or (known is not None and looks[at].step > known.step)
            known = looks[at]
            at += 1
        seen = known is not None and known.time > begins - _HOLDS
        letter = _LETTERS[known.phase] if known is not None and seen else UNSEEN
        found.append(letter.upper() if stepped else letter)
    return "".join(found)


def shares(looks: Sequence[SlotLook], cores: float = math.inf) -> tuple[float, float, float]:
    """Return the shares of time spent on data, compute and waiting.

    `cores`: CPU cores that the process has used. The script's own code counts as compute only as far as it has used a
    CPU: one reading cannot tell computing from a sleep of some milliseconds.
    """
    if not looks:
        return 0.0, 0.0, 0.0
    seen = "".join(_LETTERS[look.phase] for look in looks)
    data, waiting, other = (sum(map(seen.count, kinds)) for kinds in (_DATA, _WAITING, _OTHER))
    each = 1 / len(looks)
    own = seen.count(_OWN) * each
    compute = (len(looks) - data - waiting - other) * each - own
    compute += min(own, max(0.0, cores - compute - data * each))
    return round(data * each, 2), round(compute, 2), round(waiting * each, 2)


def place(text: Mapping[str, Any]) -> str:
    """Return where a rank is, such as "train.py:41 step"."""
    where: list[Any] = text.get("place") or []
    return f"{os.path.basename(where[0])}:{where[1]} {where[2]}" if len(where) == 3 else ""


@dataclass(frozen=True)
class _SampledSpan:
    """A span of tenths of a second by the wall clock."""

    first: int
    last: int  # exclusive
    now: float  # seconds of `time.monotonic`
    ahead: float  # of the wall clock before that


@dataclass
class _WorkerHistory:
    """Data of earlier samples of one worker."""

    last: SlotLook | None = None
    step: int = 0  # the latest that the worker reported
    counts: deque[tuple[float, int]] = field(default_factory=deque)  # when, and how many samples it had processed

    def steps(self, worker: Worker, on_slot: int) -> int:
        """Return the current step.

        The step that a worker reports is up to half a second old; its status slot counts those since. While its group
        forms again it reports none: the slot counts only steps of this process, so the last report is used.
        """
        if not worker.progress.step:
            return self.step or on_slot or -1
        self.step = worker.progress.step + (
            max(0, on_slot - worker.progress.slot_step) if worker.progress.steps_match else 0
        )
        return self.step

    def rate(self, worker: Worker) -> float:
        """Return samples per second, or -1 if the worker does not report them."""
        if worker.progress.samples < 0:
            self.counts.clear()
            return -1.0
        if self.counts and worker.progress.samples < self.counts[-1][1]:  # the worker started over
            self.counts.clear()
        if not self.counts or worker.progress.sampled > self.counts[-1][0]:
            self.counts.append((worker.progress.sampled, worker.progress.samples))
        while len(self.counts) > 2 and self.counts[-1][0] - self.counts[1][0] >= _WINDOW:
            self.counts.popleft()
        (then, before), (now, count) = self.counts[0], self.counts[-1]
        return round((count - before) / (now - then), 1) if now > then else -1.0


class RankSampleBuilder:
    """Builds the samples of one attempt's ranks on this node."""

    def __init__(self, attempt: WorkerGroup) -> None:
        self.attempt = attempt
        self._history: dict[str, _WorkerHistory] = {}
        self._until: int | None = None  # tenths of a second covered so far
        self.seconds = 1.0  # length of the latest span

    def build(self, ranks: frozenset[int], reading: NodeReading) -> tuple[RankSample, ...]:
        """Return one sample per rank, for the time since the previous call."""
        tick = reading.tick
        ticks = tick - self._until if self._until is not None else TENTHS
        first = tick - min(ticks if ticks >= 0 else TENTHS, _LONGEST)  # negative: the clock was changed
        self._until, self.seconds = tick, (tick - first) / TENTHS
        span = _SampledSpan(first, tick, reading.now, reading.wall - reading.now)
        workers = {each.worker.seat.rank: each for each in _of_ranks(reading, ranks)}
        self._history = {each.name: self._history.get(each.name, _WorkerHistory()) for each in workers.values()}
        return tuple(self._sample(each, span) for _, each in sorted(workers.items()))

    def infos(self, ranks: frozenset[int], reading: NodeReading, node: int, host: str) -> NodeRanks:
        """Return where each rank runs."""
        found = {
            each.worker.seat.rank: RankInfo(
                rank=each.worker.seat.rank, pid=each.worker.pid, device=str(each.worker.seat.slot.device or "")
            )
            for each in _of_ranks(reading, ranks)
        }
        return NodeRanks(node=node, host=host, ranks=tuple(info for _, info in sorted(found.items())))

    def _sample(self, reading: WorkerReading, span: _SampledSpan) -> RankSample:
        worker, status, stats, gpu = reading.worker, reading.status, reading.stats, reading.gpu
        rank, history = worker.seat.rank, self._history[reading.name]
        since, until = span.first / TENTHS - span.ahead, span.last / TENTHS - span.ahead
        looks = worker.probe.looks(since) if worker.probe is not None else []
        looks = [look for look in looks if look.time < until]
        strip = letters(looks, span.first, span.last, span.ahead, history.last)
        history.last = looks[-1] if looks else history.last
        step = history.steps(worker, status.step if status is not None else 0)
        if stats is None:
            return RankSample(rank=rank, step=step, phases=strip, state="X" if worker.code else "E")
        # A thread that waits for a GPU may sleep.
        data, compute, waiting = shares(looks, math.inf if gpu is not None and gpu.use > _GPU_BUSY else stats.cpu)
        text = status.text if status is not None else {}
        silent = span.now - status.looked if status is not None and status.looked and not text.get("ending") else 0.0
        return RankSample(
            rank=rank,
            step=step,
            phases=strip,
            data=data,
            compute=compute,
            waiting=waiting,
            cpu=round(stats.cpu, 2),
            memory=stats.resident,
            gpu=round(gpu.use, 2) if gpu is not None else -1.0,
            gpu_memory=gpu.memory if gpu is not None else 0,
            samples=history.rate(worker),
            state=stats.state,
            silent=round(silent, 1) if silent >= _SILENT else 0.0,
            debugged=rank in self.attempt.workers.debugged,
            place=place(text),
        )


def _of_ranks(reading: NodeReading, ranks: frozenset[int]) -> list[WorkerReading]:
    """Return the started workers of these ranks, live ones last: a dead one may just have been replaced."""
    found = [each for each in reading.workers if each.worker.pid and each.worker.seat.rank in ranks]
    return sorted(found, key=lambda each: each.worker.code is None)
