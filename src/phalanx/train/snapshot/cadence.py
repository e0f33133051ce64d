"""How often a sharded state is copied: as often as possible at a cost of at most a few percent of the training time.

A lost shard exists only in the newest snapshot, so every step since then has to be repeated. At first there is a
snapshot per step. From what these cost, all ranks choose an interval together, and review it from time to time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from phalanx.train.snapshot.snapshots import Snapshots


T = TypeVar("T")


class GatheringGroup(Protocol):
    """A process group, as far as the cadence of snapshots needs it."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        ...

    def gather(self, obj: T, *, all: bool = False) -> list[T] | None:  # noqa: A002
        """Return the objects of all ranks."""
        ...


BUDGET = 0.03  # of a step's time
_FIRST = 6  # steps before the first choice
_LEAST = 3  # snapshots that have to be measured for a choice
_REVIEW = 50  # steps, or
_SNAPSHOTS = 10  # snapshots, whichever is more, until the next choice
_RECENT = 100  # measurements that count
_told: set[int] = set()  # trainings of this process whose first choice was explained


class MeasuredCopy(NamedTuple):
    """What one rank has measured, in seconds."""

    cost: float  # of a snapshot: what it takes from the training
    duration: float  # until it is complete
    step: float  # a step's time without it


def interval(measured: Sequence[MeasuredCopy], budget: float = BUDGET) -> int:
    """Return the number of steps from one snapshot to the next.

    None begins before the last one is complete, and together they cost at most `budget` of the time. `measured` has
    one entry per rank; the slowest rank counts, because all wait for it.
    """
    step = max(statistics.median(one.step for one in measured), 1e-6)
    cost = max(one.cost for one in measured)
    duration = max(one.duration for one in measured)
    return max(1, _steps(cost / budget, step), _steps(duration, step))


def _steps(seconds: float, step: float) -> int:
    return math.ceil(seconds / step - 1e-9)


def reason(measured: Sequence[MeasuredCopy], chosen: int, budget: float = BUDGET) -> str:
    """Return one line that explains the chosen interval to the user."""
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
    """An interval that adapts to the cost of snapshots. It is asked after every committed step, as an `Interval` is."""

    def __init__(
        self,
        snapshots: Snapshots,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        *,
        training: int = 0,
    ) -> None:
        self._training = training
        self._snapshots = snapshots
        self._say = say
        self._clock = clock
        self.steps = 1
        self._from = 0  # the step that steps are counted from
        self._review: int | None = None  # the step after which the interval is chosen again
        self._last: float | None = None  # when a step was committed
        self._held = 0.0  # seconds that snapshots had taken from the training by then
        self._times: deque[float] = deque(maxlen=_RECENT)

    def passed(self, step: int, group: GatheringGroup) -> bool:
        """Return whether a snapshot is due after this step. All ranks get the same answer."""
        now, held = self._clock(), self._snapshots.held
        if self._last is not None:
            self._times.append(max(now - self._last - (held - self._held), 0.0))
        self._last, self._held = now, held
        if self._review is None:
            self._from, self._review = step, step + _FIRST
        if step >= self._review:
            self._choose(step, group)
        return (step - self._from) % self.steps == 0

    def _choose(self, step: int, group: GatheringGroup) -> None:
        costs = self._snapshots.costs
        mine = [len(costs), _median(costs), _median(self._snapshots.durations), _median(self._times)]
        gathered = group.gather(mine, all=True) or []
        self._last = None  # the time of this exchange does not belong to the next step
        if min(count for count, *_ in gathered) < _LEAST:
            self._review = step + _FIRST
            return
        measured = [MeasuredCopy(*one) for _, *one in gathered]
        before, self.steps = self.steps, interval(measured)
        self._review = step + max(_REVIEW, _SNAPSHOTS * self.steps)
        if self.steps != before:
            self._from = step
        if group.is_main and self._training not in _told:
            _told.add(self._training)
            self._say(reason(measured, self.steps))


def _median(values: Sequence[float] | deque[float]) -> float:
    return statistics.median(values) if values else 0.0
