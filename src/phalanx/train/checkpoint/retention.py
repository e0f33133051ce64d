"""Decides which checkpoints are no longer needed. A pure function."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import OptionError
from phalanx.train.checkpoint.format.folder import Info, order


@dataclass(frozen=True)
class Retention:
    """Keep the last N checkpoints, and the best N by a metric."""

    last: int = 2
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0:
            seen = f"keep_last={self.last}, keep_best={self.best}"
            raise OptionError(f"{seen}: at least the last checkpoint must be kept", fix="keep_last=2, keep_best=0")
        if self.mode not in ("min", "max"):
            raise OptionError(f'mode="{self.mode}": expected "min" or "max"', fix='mode="min"')

    def surplus(self, good: Sequence[Info], bad: Collection[str] = ()) -> list[str]:
        """Return the names to remove. A bad one is removed when it is older than the last ones that are kept."""
        newest = sorted(good, key=lambda info: order(info.name), reverse=True)
        # If a step was saved twice, the newer one counts.
        last = [info for place, info in enumerate(newest) if place == 0 or newest[place - 1].step != info.step]
        last = last[: self.last]
        kept = {info.name for info in last} | {info.name for info in self._ranked(newest)[: self.best]}
        gone = [info.name for info in newest if info.name not in kept]
        if len(last) == self.last:
            gone += [name for name in bad if order(name) < order(last[-1].name)]
        return gone

    def replaceable(self, good: Sequence[Info], bad: Collection[str] = ()) -> list[str]:
        """Return the names that would be surplus once another checkpoint is written. The newest good one is never
        removed.
        """
        return replace(self, last=max(1, self.last - 1)).surplus(good, bad)

    def is_best(self, value: float, scores: Sequence[float]) -> bool:
        """Return whether this value of the metric would be among the best, compared with the existing ones."""
        if not math.isfinite(value):
            return False
        sign = 1 if self.mode == "min" else -1
        better = [score for score in scores if math.isfinite(score) and sign * score <= sign * value]
        return len(better) < self.best

    def _ranked(self, newest: Sequence[Info]) -> list[Info]:
        """Return the best first, newer ones first if equal, without those that have no number."""
        sign = 1 if self.mode == "min" else -1
        scored = [(info.metrics.get(self.metric), info) for info in newest]
        numbers = [(sign * value, info) for value, info in scored if value is not None and math.isfinite(value)]
        return [info for _, info in sorted(numbers, key=lambda pair: pair[0])]
