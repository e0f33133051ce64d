"""Numbers, times and sizes as text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from phalanx.watch.charts import axis


def seconds(value: float) -> str:
    """Return a text such as `0.3 s`, `42 s`, `12m05`, `3h07`."""
    if value < 10:
        return f"{value:.1f} s" if value else "0 s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}"
    return f"{minutes // 60}h{minutes % 60:02d}"


def count(number: int, noun: str) -> str:
    """Return a text such as `1 rank`, `3 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spans(ranks: Sequence[int]) -> str:
    """Return ranks as `0-7, 12`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def number(value: float | None) -> str:
    """Return a measured value as `2.301`, `0.00084`, `15.9k`."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.4g}")
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else axis.number(value)


def size(amount: float) -> str:
    """Return a number of bytes as `1.5 GiB`."""
    if amount <= 0:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit in ("B", "KiB") else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def speed(rate: float) -> str:
    """Return bytes per second as `11.6 GB/s`."""
    return f"{rate / 1e9:.3g} GB/s"


def moment(when: float) -> str:
    """Return date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))


def clock(when: float) -> str:
    """Return the time of day in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(when))
