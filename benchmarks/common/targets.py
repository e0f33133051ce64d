"""Targets: limits that were set before anything was measured, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One limit. `met` is None where it was not measured, or where the noise is larger than the difference."""

    what: str
    evidence: str  # the numbers behind the judgement, or why there is none
    met: bool | None

    @property
    def status(self) -> str:
        """`met`, `missed` or `not measured`."""
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def any_missed(targets: Iterable[Target]) -> bool:
    """Return whether a target was measured and missed."""
    return any(target.met is False for target in targets)
