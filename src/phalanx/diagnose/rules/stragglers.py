"""Slow ranks: time for data, compute and waiting per rank, compared with the median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

FACTOR = 1.3  # minimum ratio to the median
_ENOUGH = 30  # minimum samples of a rank
_SHARE = 0.05  # minimum share of the step time that a delay must cost: twice almost nothing is still almost nothing
_FLOOR = 0.01  # minimum value of the median, as a share of a step
_MOST = 16  # rows of a table
_DATA, _WAITING = ("data",), ("collective", "join")
_APART = ("import", "checkpoint", "compile")  # not part of a usual step


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """How often one rank was sampled in each phase since the run began."""

    rank: int
    samples: dict[str, int]
    steps: int = 0
    seconds: float = 0.0  # time span of the samples
    host: str = ""
    gpu: int | None = None
    throttled: str = ""  # thermal, power


@dataclass(frozen=True)
class StragglerRow:
    """Seconds per step. If no steps are known: shares of the time."""

    total: Total
    data: float
    compute: float
    waiting: float

    @property
    def whole(self) -> float:
        """Seconds per step in total."""
        return self.data + self.compute + self.waiting


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the median."""

    rank: int
    what: str  # data, compute
    factor: float
    text: str


def rows(totals: Sequence[Total]) -> list[StragglerRow]:
    """Return one row per rank."""
    by_step = all(total.steps > 0 for total in totals)
    return [_row(total, by_step) for total in sorted(totals, key=lambda total: total.rank)]


def _row(total: Total, by_step: bool) -> StragglerRow:
    seen = sum(total.samples.values())
    each = total.seconds / seen / total.steps if by_step and seen else 1 / seen if seen else 0.0
    data = sum(total.samples.get(phase, 0) for phase in _DATA)
    waiting = sum(total.samples.get(phase, 0) for phase in _WAITING)
    apart = sum(total.samples.get(phase, 0) for phase in _APART)
    return StragglerRow(total, data * each, (seen - data - waiting - apart) * each, waiting * each)


def stragglers(totals: Sequence[Total]) -> list[Straggler]:
    """Return slow ranks, the slowest first. Empty with fewer than two ranks, or if the delay is insignificant."""
    known = [row for row in rows(totals) if sum(row.total.samples.values()) >= _ENOUGH and row.whole > 0]
    if len(known) < 2:
        return []
    nodes = len({row.total.host for row in known}) > 1
    whole = median(row.whole for row in known)
    found = []
    for what in ("compute", "data"):
        usual = max(_middle([getattr(row, what) for row in known]), _FLOOR * whole)
        for row in known:
            mine = getattr(row, what)
            if mine >= FACTOR * usual and mine - usual >= _SHARE * whole:
                found.append(
                    Straggler(row.total.rank, what, mine / usual, _sentence(row.total, what, mine / usual, nodes))
                )
    return sorted(found, key=lambda straggler: -straggler.factor)


def _middle(values: list[float]) -> float:
    """Return the median; of two values the smaller one."""
    return sorted(values)[(len(values) - 1) // 2]


def _sentence(total: Total, what: str, factor: float, nodes: bool) -> str:
    parts = [f"node {total.host}"] if nodes and total.host else []
    parts += [f"GPU {total.gpu}"] if total.gpu is not None else []
    where = f" ({', '.join(parts)})" if parts else ""
    times = f"{factor:.1f}" if factor < 100 else "more than 100"
    cause = f": {total.throttled} throttling" if total.throttled and what == "compute" else ""
    inside = "data loading" if what == "data" else what
    return f"rank {total.rank}{where} is {times} times slower in {inside} than the median{cause}"


def table(totals: Sequence[Total]) -> list[str]:
    """Return lines of at most 80 columns. If there are too many ranks, stragglers come first."""
    if not totals:
        return []
    late = {straggler.rank: straggler for straggler in reversed(stragglers(totals))}
    every = rows(totals)
    shown = every
    if len(every) > _MOST:
        shown = sorted(every, key=lambda row: (row.total.rank not in late, row.waiting))[:_MOST]
        shown.sort(key=lambda row: row.total.rank)
    by_step = all(total.steps > 0 for total in totals)
    lines = [f"{'rank':>5}  {'node':<16} {'gpu':>3} {'steps':>8} {'data':>9} {'compute':>9} {'waiting':>9}"]
    for row in shown:
        total = row.total
        gpu = "" if total.gpu is None else str(total.gpu)
        times = " ".join(f"{_time(value, by_step):>9}" for value in (row.data, row.compute, row.waiting))
        mark = f"  {late[total.rank].factor:.1f}x" if total.rank in late and late[total.rank].factor < 100 else ""
        mark = mark or ("  slow" if total.rank in late else "")
        lines.append(f"{total.rank:>5}  {total.host[:16]:<16} {gpu:>3} {total.steps:>8} {times}{mark}"[:80])
    if len(every) > len(shown):
        lines.append(f"{'':>5}  and {len(every) - len(shown)} more ranks")
    return lines


def _time(value: float, by_step: bool) -> str:
    if not by_step:
        return f"{value:.0%}"
    return f"{value * 1000:.1f} ms" if value < 10 else f"{value:.1f} s"
