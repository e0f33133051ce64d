"""Numbers as people read them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from phalanx.watch.charts import axis


def seconds(value: float) -> str:
    """`0.3 s`, `42 s`, `12m05`, `3h07`."""
    if value < 10:
        return f"{value:.1f} s" if value else "0 s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}"
    return f"{minutes // 60}h{minutes % 60:02d}"


def count(how_many: int, what: str) -> str:
    return f"{how_many} {what}{'' if how_many == 1 else 's'}"


def spans(ranks: Sequence[int]) -> str:
    """`0-7, 12`"""
    told: list[list[int]] = []
    for rank in sorted(ranks):
        if told and told[-1][1] == rank - 1:
            told[-1][1] = rank
        else:
            told.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in told)


def number(value: float | None) -> str:
    """`2.301`, `0.00084`, `15.9k`: what was measured, the same wherever it is shown."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.4g}")
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else axis.number(value)


def size(amount: float) -> str:
    if amount <= 0:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit in ("B", "KiB") else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def speed(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def moment(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))


def clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(when))
