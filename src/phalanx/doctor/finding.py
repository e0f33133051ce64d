"""What a check says: fact, cause, fix, and how bad it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")


@dataclass(frozen=True)
class Finding:
    """Green: as it should be. Yellow: works, but slowly, or not in every case. Red: a run would fail."""

    check: str
    level: Level
    fact: str
    cause: str = ""
    fix: str = ""
    node: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="green")
