"""The axis of a chart: its range, its ticks, and the positions of values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "count", "log", "seconds"]  # count: whole numbers

_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_HUGE = 1e100
_BIG = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A range of values."""

    low: float
    high: float
    kind: Kind = "number"

    def at(self, value: float) -> float | None:
        """Return the position of `value`: 0 at the low end, 1 at the high end. None: it cannot be shown."""
        if not placed(value, self.kind):
            return None
        if self.kind == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return about `most` round numbers, each with its label."""
        if most < 1:
            return []
        if self.kind == "log" and (powers := _powers(self.low, self.high, most)):
            return [(value, number(value)) for value in powers]
        step = self._step(most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = [index * step for index in range(int(first), int(last) + 1)]
        values = [value for value in values if -1e-6 <= (value - self.low) / (self.high - self.low) <= 1 + 1e-6]
        if self.kind == "seconds":
            return [(value, duration(value)) for value in values]
        return [(value, number(value, step, most=max(abs(self.low), abs(self.high)))) for value in values]

    def _step(self, most: int) -> float:
        least = (self.high - self.low) / most
        if self.kind == "seconds" and 1 < least <= _SECONDS[-1]:
            return float(next(step for step in _SECONDS if step >= least))
        return _round(max(least, 1.0) if self.kind == "count" else least)


def placed(value: float, kind: Kind = "number") -> bool:
    """Return whether `value` can be shown: it is finite, not huge, and positive on a log axis."""
    return math.isfinite(value) and abs(value) <= _HUGE and (kind != "log" or value >= 1 / _HUGE)


def spanning(values: Iterable[float], kind: Kind = "number") -> Axis:
    """Return an axis on which all values fit. Without values: from 0 to 1."""
    places = [value for value in values if placed(value, kind)]
    if not places:
        return Axis(0.1, 1.0, kind) if kind == "log" else Axis(0.0, 1.0, kind)
    low, high = min(places), max(places)
    if high - low <= max(max(abs(low), abs(high)) * 1e-12, 1 / _HUGE):
        if kind == "log":
            return Axis(low / 2, high * 2, kind)
        room = max(abs(low), abs(high)) * 0.1
        return Axis(low - room, high + room, kind) if room > 1 / _HUGE else Axis(min(low, 0.0), 1.0, kind)
    return Axis(low, high, kind)


def number(value: float, step: float = 0.0, *, most: float = 0.0) -> str:
    """Return a short text such as `1.5k`, `0.0002`, `3e-5`, exact enough for numbers that are `step` apart.

    The page formats numbers in the same way (page/assets/common/format.js).
    """
    if value == 0:
        return "0"
    if not step:
        value = float(f"{value:.3g}")  # before choosing the unit: 999,950 is 1M
    size = max(abs(value), most)
    for unit, letter in _BIG:
        if size >= unit * (10 if unit == 1e3 else 1) and size < 1e15:
            return f"{_plain(value / unit, step / unit)}{letter}"
    if size >= 1e15 or size < 1e-4:
        digits = _digits(step / 10 ** math.floor(math.log10(abs(value)))) if step else 2
        number, _, power = f"{value:.{digits}e}".partition("e")
        return f"{number.rstrip('0').rstrip('.') if '.' in number else number}e{int(power)}"
    return _plain(value, step)


def duration(seconds: float) -> str:
    """Return a text such as `40s`, `5m`, `1h30`, `2d`."""
    if abs(seconds) < 60:
        return f"{seconds:.3g}s"
    minutes = round(seconds / 60)
    if abs(seconds) < 600 and seconds % 60:
        return f"{int(seconds // 60)}m{round(seconds % 60):02d}"
    if abs(minutes) < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48 and not (hours % 24 == 0 and not minutes and hours):
        return f"{hours}h{minutes:02d}" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h" if hours else f"{days}d"


def _plain(value: float, step: float) -> str:
    if not step:
        return f"{value:.3g}"
    return f"{value:.{_digits(step)}f}"


def _digits(step: float) -> int:
    """Return the number of decimals that distinguishes numbers that differ by `step`."""
    digits = max(0, min(12, -math.floor(math.log10(abs(step)) + 1e-9)))
    # 2.5 and 0.25 need one more digit
    return digits + int(abs(step * 10**digits - round(step * 10**digits)) > 1e-6)


def _round(least: float) -> float:
    """Return the next of 1, 2, 5, 10, … that is not smaller."""
    power = float(10.0 ** math.floor(math.log10(least)))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= least * (1 - 1e-9)), power * 10)


def _powers(low: float, high: float, most: int) -> list[float]:
    """Return 1, 2, 5, 10, … or 1, 10, 100, … or fewer of them; empty if fewer than two lie in the range."""
    first, last = math.floor(math.log10(low) + 1e-9), math.floor(math.log10(high) + 1e-9)
    for factors in ((1, 2, 5), (1,)):
        values = [10.0**power * factor for power in range(first, last + 1) for factor in factors]
        values = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(values) <= most:
            return values
    return values[:: math.ceil(len(values) / most)] if len(values) > most else []
