"""Which checkpoints are no longer needed? A pure answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.errors import OptionError
from phalanx.train.checkpoint.folder import Info, order


@dataclass(frozen=True)
class Retention:
    """Keep the last so many, and the best so many by a metric."""

    last: int = 2
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0:
            seen = f"keep_last={self.last}, keep_best={self.best}"
            raise OptionError(f"{seen}: at least the last one has to be kept", fix="keep_last=2, keep_best=0")
        if self.mode not in ("min", "max"):
            raise OptionError(f'mode="{self.mode}": better is less ("min") or more ("max")', fix='mode="min"')

    def surplus(self, good: Sequence[Info], bad: Collection[str] = ()) -> list[str]:
        """Names to remove. A bad one does not count, and goes when it is older than all that are kept as the last."""
        newest = sorted(good, key=lambda info: order(info.name), reverse=True)
        # Of a step that was saved twice the newer counts.
        last = [info for place, info in enumerate(newest) if place == 0 or newest[place - 1].step != info.step]
        last = last[: self.last]
        kept = {info.name for info in last} | {info.name for info in self._ranked(newest)[: self.best]}
        gone = [info.name for info in newest if info.name not in kept]
        if len(last) == self.last:
            gone += [name for name in bad if order(name) < order(last[-1].name)]
        return gone

    def _ranked(self, newest: Sequence[Info]) -> list[Info]:
        """Best first; of equals the newer; those without a number are not among them."""
        sign = 1 if self.mode == "min" else -1
        scored = [(info.metrics.get(self.metric), info) for info in newest]
        numbers = [(sign * value, info) for value, info in scored if value is not None and math.isfinite(value)]
        return [info for _, info in sorted(numbers, key=lambda pair: pair[0])]
