"""Chooses how often a state is copied that ranks may lose: as often as possible at a cost of at most a few percent of
the training time.

A lost shard exists only in the newest snapshot, so every step since then must be repeated. The same is true of a step
with several updates, if a rank is lost between them: all others have made one of them already. At first there is a
snapshot per step. From the cost of these, all ranks choose an interval together, and review it at intervals.

The seconds that the training thread waits for a snapshot are only a part of its cost: the copy also competes with the
training for memory and links. So unless snapshots are very short, steps with and without one are compared.
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
_LEAST = 3  # snapshots that must be measured before a choice
_PERIODS = 6  # snapshots, each followed by a step without one, whose steps are compared
# The next choice follows after this many steps or snapshots, whichever is later. The steps double after each choice.
_REVIEW = 50
_SNAPSHOTS = 10
_RARELY = 2000  # maximum of these steps
_RECENT = 100  # steps whose times count
_explained: set[int] = set()  # trainings of this process whose first choice was explained


class MeasuredCopy(NamedTuple):
    """The measurements of one rank, in seconds."""

    cost: float  # time that a snapshot takes from the training
    duration: float  # until it is complete
    step: float  # a step's time without it


class StepTime(NamedTuple):
    """The time of one step, in seconds."""

    whole: float
    held: float  # part of it in which the training thread was busy with a snapshot


class SnapshotComparison(NamedTuple):
    """The comparison of steps with and without a snapshot, in seconds."""

    cost: float  # of a snapshot
    step: float  # the time of a step without one


def interval(measured: Sequence[MeasuredCopy], budget: float = BUDGET) -> int:
    """Return the number of steps from one snapshot to the next.

    None begins before the last one is complete, and together they cost at most `budget` of the time. `measured` has
    one entry per rank; the slowest rank counts, because all wait for it.
    """
    step = max(statistics.median(one.step for one in measured), 1e-6)
    cost = max(one.cost for one in measured)
    duration = max(one.duration for one in measured)
    return max(1, _steps(cost / budget, step), _steps(duration, step))


def is_cheap(measured: Sequence[MeasuredCopy], budget: float = BUDGET) -> bool:
    """Return whether a snapshot per step costs at most `budget` even if it stops the training until it is complete."""
    step = statistics.median(one.step for one in measured)
    return max(max(one.duration, one.cost) for one in measured) <= budget * step


def shortest_period(measured: Sequence[MeasuredCopy]) -> int:
    """Return the smallest number of steps between snapshots for which the last step has no concurrent copy."""
    step = max(statistics.median(one.step for one in measured), 1e-6)
    return 1 + max(1, _steps(max(one.duration for one in measured), step))


def comparison(times: Sequence[StepTime], period: int) -> SnapshotComparison:
    """Compare steps with a concurrent copy with those without one: the last step of each period."""
    whole = [time.whole for time in times]
    periods = [whole[begin : begin + period] for begin in range(0, len(whole) - period + 1, period)]
    alone = _median([one[-1] for one in periods])
    return SnapshotComparison(max(_median([sum(one) - period * alone for one in periods]), 0.0), alone)


def _steps(seconds: float, step: float) -> int:
    return math.ceil(seconds / step - 1e-9)


def reason(
    measured: Sequence[MeasuredCopy], chosen: int, budget: float = BUDGET, *, of: str = "the sharded state"
) -> str:
    """Return one line that explains the chosen interval to the user."""
    step = max(statistics.median(one.step for one in measured), 1e-6)
    cost = max(one.cost for one in measured)
    often = "every step" if chosen == 1 else f"every {chosen} steps"
    share = f"{100 * cost / step / chosen:.1f}% of the time, at most {100 * budget:.0f}% allowed"
    return (
        f"phalanx: snapshots of {of}: {often} "
        f"(each costs {_time(cost)}, a step takes {_time(step)}: {share}; --snapshot-every N to choose)"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


class Cadence:
    """An interval that adapts to the cost of snapshots. Called after every committed step, like an `Interval`."""

    def __init__(
        self,
        snapshots: Snapshots,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        *,
        training: int = 0,
        of: str = "the sharded state",
    ) -> None:
        self._training = training
        self._of = of
        self._snapshots = snapshots
        self._say = say
        self._clock = clock
        self.steps = 1
        self._from = 0  # the step from which steps are counted
        self._review: int | None = None  # the step after which the interval is chosen again
        self._distance = _REVIEW  # steps from a choice to the next
        self._period = 0  # steps from one snapshot to the next while steps are compared; else 0
        self._last: float | None = None  # when a step was committed
        self._held = 0.0  # seconds that snapshots had taken from the training until then
        self._times: deque[StepTime] = deque(maxlen=_RECENT)

    def passed(self, step: int, group: GatheringGroup) -> bool:
        """Return whether a snapshot is due after this step. All ranks get the same answer."""
        now, held = self._clock(), self._snapshots.held
        if self._last is not None:
            self._times.append(StepTime(now - self._last, held - self._held))
        self._last, self._held = now, held
        if self._review is None:
            self._from, self._review = step, step + _FIRST
        if step >= self._review:
            self._decide(step, group)
            self._last = self._clock()  # the time of this exchange does not belong to the next step
        return (step - self._from) % (self._period or self.steps) == 0

    def _decide(self, step: int, group: GatheringGroup) -> None:
        """Choose the interval, or compare steps first."""
        costs = self._snapshots.costs
        alone = _median([max(time.whole - time.held, 0.0) for time in self._times])
        compared = comparison(self._times, self._period) if self._period else SnapshotComparison(0.0, alone)
        mine = [len(costs), _median(costs), _median(self._snapshots.durations), *compared]
        gathered = group.gather(mine, all=True) or []
        if min(count for count, *_ in gathered) < _LEAST:
            self._period, self._review = 0, step + _FIRST
            return
        extra = statistics.median(row[3] for row in gathered)  # ranks wait for each other: all lose the same time
        measured = [MeasuredCopy(max(cost, extra), duration, alone) for _, cost, duration, _, alone in gathered]
        if not self._period and not is_cheap(measured):
            self._period = max(self.steps, shortest_period(measured))
            self._from, self._review = step, step + _PERIODS * self._period
            self._times = deque(maxlen=_PERIODS * self._period)
            return
        self._period = 0
        before, self.steps = self.steps, interval(measured)
        self._review = step + max(self._distance, _SNAPSHOTS * self.steps)
        self._distance = min(2 * self._distance, _RARELY)
        self._times = deque(maxlen=_RECENT)
        if self.steps != before:
            self._from = step
        if group.is_main and self._training not in _explained:
            _explained.add(self._training)
            self._say(reason(measured, self.steps, of=self._of))


def _median(values: Sequence[float] | deque[float]) -> float:
    return statistics.median(values) if values else 0.0
