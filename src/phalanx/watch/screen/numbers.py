"""Numbers in a few characters."""

from __future__ import annotations

from phalanx.watch.charts import formatting


def size(count: int) -> str:
    """Return a number of bytes."""
    value = float(count)
    for unit in "BKMGT":
        if value < 999.5 or unit == "T":
            return f"{value:.1f}{unit}" if value < 9.95 and unit != "B" else f"{value:.0f}{unit}"
        value /= 1024
    return ""


def rate(value: float) -> str:
    """Return a rate."""
    if value >= 9999.5:
        return f"{value / 1000:.0f}k" if value >= 99999.5 else f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def share(value: float) -> str:
    """Return a percentage. 100% means all: a smaller share is never rounded up to it."""
    return f"{min(int(value * 1000) / 10, 99.9):.1f}%" if 0.99 <= value < 1 else f"{value * 100:.0f}%"


def span(seconds: float) -> str:
    """Return a duration as 0:07, 12:34, 1:02:03, 3d 04:05."""
    whole = max(int(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def about(seconds: float) -> str:
    """Return an approximate duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} days"


def value(number: float) -> str:
    """Return a measured value, formatted as in all other views."""
    return formatting.number(number)
