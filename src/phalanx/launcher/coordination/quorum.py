"""Decides which side of a broken network may continue a run whose leader is lost. Pure.

Every node knows the last members, in the order in which they lead: the leader, then all others. Some of them are known
to have ended. Any other may still run on the other side of a broken link, even if it does not answer. A side continues
if it has most of the members that may still run. If two sides have equally many, the one with the first of them
continues. So of two sides with the same knowledge, at most one continues.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Electorate:
    """The last known members of a run."""

    order: tuple[int, ...]  # the lost leader, then all others in the order of succession
    ended: frozenset[int] = frozenset()  # members that are known to have ended

    @property
    def possible(self) -> Sequence[int]:
        """Return the members that may still run, in their order."""
        return [member for member in self.order if member not in self.ended]

    def elects(self, here: Collection[int]) -> bool:
        """Return whether the members of one side may continue the run."""
        possible = self.possible
        present = sum(member in here for member in possible)
        tie = 2 * present == len(possible)
        return 2 * present > len(possible) or (tie and bool(possible) and possible[0] in here)

    def missing(self, here: Collection[int]) -> str:
        """Return why a side may not continue."""
        possible = self.possible
        absent = [member for member in possible if member not in here]
        nodes = f"node{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        may = "they may" if len(absent) > 1 else "it may"
        return (
            f"{len(possible) - len(absent)} of {len(possible)} nodes are here, and {nodes} cannot be reached: "
            f"{may} continue the run; stopping to prevent split-brain"
        )
