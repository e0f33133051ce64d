"""Samples of launches, their medians, and the targets that are judged by them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.targets import Target

ENDS = {"allreduce": "first all_reduce", "adamw": "first AdamW step"}


@dataclass(frozen=True)
class LaunchCase:
    """A launcher, an end point (the name of a script) and a number of ranks."""

    contender: str
    end: str
    ranks: int


@dataclass(frozen=True)
class LaunchSample:
    """One launch. A failed launch has a reason and no times."""

    case: LaunchCase
    round: int
    seconds: float | None  # until the last rank had passed the end point
    total: float | None  # until the launcher had exited
    failure: str = ""


@dataclass(frozen=True)
class LaunchTimes:
    """All rounds of one case."""

    times: tuple[float, ...]
    failed: int = 0

    @property
    def median(self) -> float | None:
        """The median in seconds, or None if every launch failed."""
        return statistics.median(self.times) if self.times else None


@dataclass(frozen=True)
class LaunchSettings:
    """What is measured."""

    ranks: tuple[int, ...]
    repeat: int
    contenders: tuple[str, ...]
    ends: tuple[str, ...]


@dataclass
class LaunchResults:
    """All samples of one benchmark run."""

    settings: LaunchSettings
    samples: list[LaunchSample] = field(default_factory=list)
    imports: list[LaunchSample] = field(default_factory=list)  # of torch alone, in a fresh interpreter

    def times(self, contender: str, end: str, ranks: int, *, total: bool = False) -> LaunchTimes:
        """Return the times of one case; with `total`, those until the launcher had exited."""
        of_case = [sample for sample in self.samples if sample.case == LaunchCase(contender, end, ranks)]
        return _times(of_case, total=total)

    @property
    def import_times(self) -> LaunchTimes:
        """The times of `import torch`."""
        return _times(self.imports)

    @property
    def failures(self) -> list[LaunchSample]:
        """The launches that failed."""
        return [sample for sample in (*self.imports, *self.samples) if sample.failure]


def _times(samples: Sequence[LaunchSample], *, total: bool = False) -> LaunchTimes:
    times = [sample.total if total else sample.seconds for sample in samples]
    return LaunchTimes(tuple(time for time in times if time is not None), sum(1 for time in times if time is None))


def targets(results: LaunchResults) -> list[Target]:
    """Judge all targets by medians."""

    def cold(end: str, ranks: int) -> LaunchTimes:
        return results.times("phalanx", end, ranks)

    def quotient(what: str, times: LaunchTimes, of: LaunchTimes, limit: float) -> Target:
        if times.median is None or of.median is None or times.failed or of.failed:
            return Target(what, _not_measured(times, of), None)
        share = times.median / of.median
        return Target(what, f"{times.median:.2f} s / {of.median:.2f} s = {share:.3f}", share <= limit)

    def below(what: str, times: LaunchTimes, limit: float) -> Target:
        if times.median is None or times.failed:
            return Target(what, _not_measured(times), None)
        return Target(what, f"{times.median:.3f} s", times.median < limit)

    first, step = ENDS["allreduce"], ENDS["adamw"]
    reduce8, step8 = cold("allreduce", 8), cold("adamw", 8)
    return [
        quotient(
            f"{first}, 8 ranks: at most 1/5 of torchrun's", reduce8, results.times("torchrun", "allreduce", 8), 1 / 5
        ),
        quotient(f"{first}, 8 ranks: at most 1.3 of one `import torch`", reduce8, results.import_times, 1.3),
        quotient(f"{step}, 8 ranks: at most 1/4 of torchrun's", step8, results.times("torchrun", "adamw", 8), 1 / 4),
        quotient(f"{first}: 16 ranks at most 1.5 of 2", cold("allreduce", 16), cold("allreduce", 2), 1.5),
        quotient(f"{step}: 16 ranks at most 1.5 of 2", cold("adamw", 16), cold("adamw", 2), 1.5),
        below(f"{first}, 8 ranks, warm: below 0.5 s", results.times("warm", "allreduce", 8), 0.5),
        below(f"{step}, 8 ranks, warm: below 1 s", results.times("warm", "adamw", 8), 1.0),
    ]


def _not_measured(*cases: LaunchTimes) -> str:
    failed, tried = sum(one.failed for one in cases), sum(one.failed + len(one.times) for one in cases)
    return f"{failed} of {tried} launches failed" if failed else "not part of this run"
