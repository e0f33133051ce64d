"""Statistics of contenders that were measured side by side, round by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Pairs = Sequence[tuple[float, float]]  # (contender, baseline) of each round


def rotated(names: Sequence[str], turn: int) -> tuple[str, ...]:
    """Return `names` in the order of round `turn`: every name is first equally often."""
    first = turn % len(names)
    return (*names[first:], *names[:first])


def median(numbers: Sequence[float]) -> float | None:
    """Return the median, or None if there are no numbers."""
    return statistics.median(numbers) if numbers else None


def median_error(values: Sequence[float]) -> float:
    """Return the half width of the median's 95 % confidence interval.

    It is estimated from the quartiles, because outliers are frequent.
    """
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    low, high = quartiles(ordered)
    return 2 * 1.2533 * (high - low) / 1.349 / math.sqrt(len(ordered))


def quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of sorted values."""
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]


def relative_difference(pairs: Pairs) -> tuple[float, float]:
    """Return how much more the contender takes than the baseline (0.01: one percent), and the error of that."""
    ratios = [contender / baseline for contender, baseline in pairs]
    return round(statistics.median(ratios) - 1, 5), round(median_error(ratios), 5)
