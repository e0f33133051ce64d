"""Values of command-line options that several benchmarks have."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import OptionError


def choices(option: str, text: str, known: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names in the comma-separated `text`, without duplicates; OptionError if one is not in `known`."""
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise OptionError(f'{option}: "{unknown[0]}" is none of {", ".join(known)}', fix=f"{option} {','.join(known)}")
    return names


def positive_numbers(option: str, text: str, example: str) -> tuple[int, ...]:
    """Return the sorted positive integers in the comma-separated `text`; OptionError if it has anything else."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise OptionError(f'{option} "{text}" is not a list of positive integers', fix=f"{option} {example}")
    return numbers
