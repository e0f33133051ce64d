"""Numbers as ranges of first and last: short if the numbers are dense, however many there are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

Ranges = tuple[tuple[int, int], ...]


def encode(numbers: Iterable[int]) -> Ranges:
    """Return sorted numbers as ranges."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return tuple((first, last) for first, last in found)


def decode(ranges: Ranges, most: int) -> frozenset[int]:
    """Return the numbers of ranges, at most `most`: the ranges may come from another node."""
    return frozenset(islice((number for first, last in ranges for number in range(first, last + 1)), most))
