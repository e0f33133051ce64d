"""Weights of losses, with which the mean over ranks is the mean over samples."""

from __future__ import annotations

from typing import Any

from phalanx.errors import UsageError


class SampleWeights:
    """Weights losses by their number of samples, relative to the first micro-batch of a window.

    Gradients of batches of equal size therefore need no correction.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.share = 1.0  # of the current micro-batch, in relation to the first one of its window
        self._reference = 0.0  # samples of a window's first micro-batch, all ranks

    def weigh(self, loss: Any, count: int, total: int) -> Any:
        """Return the mean loss of this rank's `count` samples as its part of the mean over all ranks' `total`."""
        weight = count * self.world_size / self._measure(count, total)
        if count == 0:
            return loss.nan_to_num() * 0.0  # the rank has no samples, but takes part in the backward
        return loss if weight == 1.0 else loss * weight

    def weigh_each(self, losses: Any, count: int, total: int) -> Any:
        """Return the same for one loss per sample; the first `count` count, the rest is padding."""
        weight = self.world_size / self._measure(count, total)
        if count == 0:
            return losses.nan_to_num().sum() * 0.0
        return losses[:count].sum() * weight

    def end_window(self) -> None:
        """Make the next micro-batch the first one of its window."""
        self._reference = 0.0

    def _measure(self, count: int, total: int) -> float:
        """Return how many samples weigh as much as one micro-batch of this window."""
        if not 0 <= count <= total or total < 1:
            raise UsageError(
                f"weigh(loss, {count}, {total}): expected 0 <= count <= total",
                fix="weigh(loss, len(x), the sum of len(x) over all ranks)",
            )
        reference = self._reference
        if reference == 0.0:
            reference = self._reference = float(total)
        self.share = total / reference
        return reference
