"""Reports a loss that becomes NaN or infinite, once, and when it is finite again. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


class NonFiniteWatch:
    """Checks the metrics of committed steps, in their order."""

    def __init__(self) -> None:
        self._good: dict[str, tuple[int, float]] = {}  # the last finite value of each metric, and its step
        self._bad: dict[str, int] = {}  # metrics that are NaN or infinite, and since which step

    def look(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return lines about losses that became NaN or infinite with this step, or are finite again."""
        found = []
        for name, value in values.items():
            if "loss" not in name.lower():  # other metrics may be undefined at times
                continue
            if math.isfinite(value):
                if name in self._bad:
                    count = step - self._bad.pop(name)
                    found.append(f"{name} is finite again at step {step}, after {count} step{'s' if count > 1 else ''}")
                self._good[name] = step, value
            elif name not in self._bad:
                self._bad[name] = step
                found.append(_became(name, step, value, self._good.get(name)))
        return found


def _became(name: str, step: int, value: float, good: tuple[int, float] | None) -> str:
    before = f"; it was {good[1]:.4g} at step {good[0]}" if good is not None else ""
    text = f"{name} is {value} since step {step}{before}"
    fix = "a lower learning rate, run.step(opt, clip=1.0), or another look at the batch of that step"
    if good is not None:
        fix += f"; a checkpoint up to step {good[0]} is good"
    return f"{text}\n  fix: {fix}"
