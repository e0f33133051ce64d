"""Sizes, speeds and times as text."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float) -> str:
    """Return e.g. `64 MiB`, `1.5 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def speed(rate: float) -> str:
    """Return bytes per second, e.g. `1.2 GB/s`."""
    return _scaled(rate, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def seconds(value: float) -> str:
    """Return e.g. `35 µs`, `1.2 ms`, `3.4 s`."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if abs(value) * scale < 1000:
            return f"{_short(value * scale)} {unit}"
    return f"{_short(value)} s"


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(words: Sequence[str], most: int = 4) -> str:
    """Return the first few words, and how many more there are."""
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{_short(value)} {unit}"
        value /= base
    return f"{_short(value)} {units[-1]}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if abs(value) < 10 else f"{value:.0f}"
