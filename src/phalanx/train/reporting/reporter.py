"""What rank 0 shows and writes about a run: the progress bar, the metrics files, and the values for its agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.train.kept import TrainingProgress
from phalanx.train.reporting.measuring import Measuring
from phalanx.train.reporting.metrics import Metrics
from phalanx.train.reporting.progress import ProgressBar

if TYPE_CHECKING:
    from phalanx.contract.worker_messages import MeasuredStep


class RunReporter:
    """Reports committed steps. Only rank 0 calls `begin` and `committed`."""

    def __init__(self, counter: TrainingProgress, measured: Callable[[MeasuredStep], None] | None) -> None:
        self.bar: ProgressBar | None = None
        self._counter = counter
        self._measured = measured  # sends values to the agent
        self._metrics: Metrics | None = None
        self._measuring: Measuring | None = None

    def begin(self, total: int | None, folder: str | None, values: Mapping[str, Any]) -> None:
        """Report the first step. It is slower than all others, so speed is measured without it."""
        self.bar = ProgressBar(total, start=self._counter.steps, title=self._title)
        self.bar.advance(0, values, steps=0)
        if self._measured is not None:
            self._measuring = Measuring(self._measured, total)
        if folder is not None:
            self._metrics = Metrics(folder, resumed_at=self._counter.steps - 1)
        self._write(values)

    def committed(self, samples: int, values: Mapping[str, Any]) -> None:
        """Report a later step: `samples` of all ranks, and its metrics."""
        if self.bar is not None:
            self.bar.advance(samples, values)
        self._write(values)

    def _write(self, values: Mapping[str, Any]) -> None:
        counter = self._counter
        waited = (
            self._metrics is not None and bool(values) and self._metrics.write(counter.steps, counter.epoch, values)
        )
        if self._measuring is not None:
            self._measuring.advance(counter.steps, counter.epoch, values, waited=waited)

    @property
    def _title(self) -> str:
        counter = self._counter
        return "" if counter.epochs is None else f"epoch {counter.epoch + 1}/{counter.epochs}"

    def epoch_begun(self) -> None:
        """Show the epoch that the counter is at."""
        if self.bar is not None:
            self.bar.title = self._title

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which something else can be printed, above the bar."""
        return self.bar.aside() if self.bar is not None else contextlib.nullcontext()

    def flush(self) -> None:
        """Write the metrics so far."""
        if self._metrics is not None:
            self._metrics.flush()

    def finish(self) -> None:
        """Send the agent the values of the last step."""
        if self._measuring is not None:
            self._measuring.close()

    def close(self) -> None:
        """Close the bar and the metrics files."""
        with contextlib.ExitStack() as stack:
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            if self.bar is not None:
                stack.callback(self.bar.close)
