"""What was measured, and what was promised: samples of launches, their medians, targets judged by them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

ENDS = {"allreduce": "first all_reduce", "adamw": "first AdamW step"}


@dataclass(frozen=True)
class Case:
    contender: str
    end: str
    ranks: int


@dataclass(frozen=True)
class Sample:
    """One launch. A launch that failed has a reason, and no time."""

    case: Case
    round: int
    seconds: float | None  # until the last rank had passed the end point
    total: float | None  # until the launcher had exited
    failure: str = ""


@dataclass(frozen=True)
class Cell:
    """All rounds of one case."""

    times: tuple[float, ...]
    failed: int = 0

    @property
    def median(self) -> float | None:
        return statistics.median(self.times) if self.times else None


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...]
    repeat: int
    contenders: tuple[str, ...]
    ends: tuple[str, ...]


@dataclass
class Results:
    settings: Settings
    samples: list[Sample] = field(default_factory=list)
    imports: list[Sample] = field(default_factory=list)  # of torch alone, in a fresh interpreter

    def cell(self, contender: str, end: str, ranks: int, *, total: bool = False) -> Cell:
        of_case = [sample for sample in self.samples if sample.case == Case(contender, end, ranks)]
        return _cell(of_case, total=total)

    @property
    def one_import(self) -> Cell:
        return _cell(self.imports)

    @property
    def failures(self) -> list[Sample]:
        return [sample for sample in (*self.imports, *self.samples) if sample.failure]


def _cell(samples: Sequence[Sample], *, total: bool = False) -> Cell:
    times = [sample.total if total else sample.seconds for sample in samples]
    return Cell(tuple(time for time in times if time is not None), sum(1 for time in times if time is None))


@dataclass(frozen=True)
class Target:
    what: str
    evidence: str  # the medians it was judged by, or why it could not be
    met: bool | None  # None: not measured


def targets(results: Results) -> list[Target]:
    """Stated before anything was measured, and judged by medians."""

    def cold(end: str, ranks: int) -> Cell:
        return results.cell("phalanx", end, ranks)

    def quotient(what: str, cell: Cell, of: Cell, limit: float) -> Target:
        if cell.median is None or of.median is None or cell.failed or of.failed:
            return Target(what, _not_measured(cell, of), None)
        share = cell.median / of.median
        return Target(what, f"{cell.median:.2f} s / {of.median:.2f} s = {share:.3f}", share <= limit)

    def below(what: str, cell: Cell, limit: float) -> Target:
        if cell.median is None or cell.failed:
            return Target(what, _not_measured(cell), None)
        return Target(what, f"{cell.median:.3f} s", cell.median < limit)

    first, step = ENDS["allreduce"], ENDS["adamw"]
    reduce8, step8 = cold("allreduce", 8), cold("adamw", 8)
    return [
        quotient(
            f"{first}, 8 ranks: at most 1/5 of torchrun's", reduce8, results.cell("torchrun", "allreduce", 8), 1 / 5
        ),
        quotient(f"{first}, 8 ranks: at most 1.3 of one `import torch`", reduce8, results.one_import, 1.3),
        quotient(f"{step}, 8 ranks: at most 1/4 of torchrun's", step8, results.cell("torchrun", "adamw", 8), 1 / 4),
        quotient(f"{first}: 16 ranks at most 1.5 of 2", cold("allreduce", 16), cold("allreduce", 2), 1.5),
        quotient(f"{step}: 16 ranks at most 1.5 of 2", cold("adamw", 16), cold("adamw", 2), 1.5),
        below(f"{first}, 8 ranks, warm: below 0.5 s", results.cell("warm", "allreduce", 8), 0.5),
        below(f"{step}, 8 ranks, warm: below 1 s", results.cell("warm", "adamw", 8), 1.0),
    ]


def _not_measured(*cells: Cell) -> str:
    failed, tried = sum(cell.failed for cell in cells), sum(cell.failed + len(cell.times) for cell in cells)
    return f"{failed} of {tried} launches failed" if failed else "not part of this run"
