"""Every how many steps a sharded state is copied: as often as costs at most a few percent of the training's time.

A lost shard is nowhere but in the newest snapshot, so every step between two snapshots may have to be done again. At
first there is a snapshot at every step; from what those cost, all ranks choose the interval together, and look again
from time to time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from phalanx.train.snapshot.snapshots import Snapshots


T = TypeVar("T")


class ShardedRun(Protocol):
    """A training run, as far as the cadence of its snapshots needs it."""

    steps: int
    training: Any

    @property
    def is_main(self) -> bool: ...

    def gather(self, obj: T, *, all: bool = False) -> list[T] | None: ...  # noqa: A002


BUDGET = 0.03  # of a step's time
_FIRST = 6  # steps before the first choice
_LEAST = 3  # snapshots that have to be measured for a choice
_REVIEW = 50  # steps, or
_SNAPSHOTS = 10  # snapshots, whichever is more, until the next choice
_RECENT = 100  # measurements that count
_told: set[int] = set()  # trainings of this process whose first choice was explained


class MeasuredCopy(NamedTuple):
    """By one rank, in seconds."""

    cost: float  # of a snapshot: what it takes from the training
    duration: float  # until it is complete
    step: float  # a step's time without it


def interval(measured: Sequence[MeasuredCopy], budget: float = BUDGET) -> int:
    """Steps from one snapshot to the next: none is begun before the last one is complete, and together they cost at
    most `budget`. `measured`: by each rank; the slowest counts, for all wait for it."""
    step = max(statistics.median(one.step for one in measured), 1e-6)
    cost = max(one.cost for one in measured)
    duration = max(one.duration for one in measured)
    return max(1, _steps(cost / budget, step), _steps(duration, step))


def _steps(seconds: float, step: float) -> int:
    return math.ceil(seconds / step - 1e-9)


def reason(measured: Sequence[MeasuredCopy], chosen: int, budget: float = BUDGET) -> str:
    """One line, for whoever runs the training."""
    step = max(statistics.median(one.step for one in measured), 1e-6)
    cost = max(one.cost for one in measured)
    often = "every step" if chosen == 1 else f"every {chosen} steps"
    share = f"{100 * cost / step / chosen:.1f}% of the time, at most {100 * budget:.0f}% allowed"
    return (
        f"phalanx: snapshots of the sharded state: {often} "
        f"(each costs {_time(cost)}, a step takes {_time(step)}: {share}; --snapshot-every N to choose)"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


class Cadence:
    """Asked after every committed step, as an `Interval` is; the same answer on every rank."""

    def __init__(
        self,
        snapshots: Snapshots,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._snapshots = snapshots
        self._say = say
        self._clock = clock
        self.steps = 1
        self._from = 0  # the step that steps are counted from
        self._review: int | None = None  # the step after which the interval is chosen again
        self._last: float | None = None  # when a step was committed
        self._held = 0.0  # seconds that snapshots had taken from the training by then
        self._times: deque[float] = deque(maxlen=_RECENT)

    def passed(self, run: ShardedRun) -> bool:
        now, held = self._clock(), self._snapshots.held
        if self._last is not None:
            self._times.append(max(now - self._last - (held - self._held), 0.0))
        self._last, self._held = now, held
        if self._review is None:
            self._from, self._review = run.steps, run.steps + _FIRST
        if run.steps >= self._review:
            self._choose(run)
        return (run.steps - self._from) % self.steps == 0

    def _choose(self, run: ShardedRun) -> None:
        costs = self._snapshots.costs
        mine = [len(costs), _median(costs), _median(self._snapshots.durations), _median(self._times)]
        told = run.gather(mine, all=True) or []
        self._last = None  # the step after this one is timed from its own commit on
        if min(count for count, *_ in told) < _LEAST:
            self._review = run.steps + _FIRST
            return
        measured = [MeasuredCopy(*one) for _, *one in told]
        before, self.steps = self.steps, interval(measured)
        self._review = run.steps + max(_REVIEW, _SNAPSHOTS * self.steps)
        if self.steps != before:
            self._from = run.steps
        if run.is_main and run.training not in _told:
            _told.add(run.training)
            self._say(reason(measured, self.steps))


def _median(values: Sequence[float] | deque[float]) -> float:
    return statistics.median(values) if values else 0.0
