"""The result of a check: fact, cause, fix, and level."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")


@dataclass(frozen=True)
class Finding:
    """Green: OK. Yellow: works, but slowly or not always. Red: a run would fail."""

    check: str
    level: Level
    fact: str
    cause: str = ""
    fix: str = ""
    node: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="green")
