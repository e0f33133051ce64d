"""The output of a run: the progress bar, the metrics files, and the values for the agent. Done by rank 0; other ranks
send their logged values to rank 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.train.kept.kept_objects import TrainingProgress
from phalanx.train.reporting.measuring import Measuring
from phalanx.train.reporting.metrics import FLUSH_EVERY, Ending, Metrics, read
from phalanx.train.reporting.progress import ProgressBar
from phalanx.train.reporting.rank_log import LoggedRow, RankLog
from phalanx.train.reporting.trackers import Tracker

if TYPE_CHECKING:
    from phalanx.contract.messages.worker_messages import MeasuredStep

_REMEMBERED = 1000  # calls of `run.log` that are kept for comparison with those of other ranks


class RunReporter:
    """Reports committed steps and logged values. Only rank 0 calls `begin` and `committed`.

    folder    returns the folder of the metrics; None: metrics are not written
    rank_log  sends values that other ranks log to rank 0
    """

    def __init__(
        self,
        counter: TrainingProgress,
        measured: Callable[[MeasuredStep], None] | None,
        *,
        folder: Callable[[], str | None] = lambda: None,
        rank_log: RankLog | None = None,
        rank: int = 0,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.bar: ProgressBar | None = None
        self._counter = counter
        self._measured = measured  # sends values to the agent
        self._folder = folder
        self._rank_log = rank_log
        self._rank = rank
        self._trackers = trackers
        self._metrics: Metrics | None = None
        self._measuring: Measuring | None = None
        self._early: list[tuple[int, float, dict[str, Any]]] = []  # logged before the first step, which has the number
        self._logged: dict[tuple[int, tuple[str, ...]], Mapping[str, Any]] = {}  # the latest of rank 0
        self._held: list[LoggedRow] = []  # of other ranks, for a step that rank 0 has not left yet
        self._due = 0.0

    def begin(self, total: int | None, values: Mapping[str, Any], *, reported: bool = False) -> None:
        """Report the first step. It is slower than all others, so speed is measured without it.

        `reported`: its loss is not finite, and that was already reported.
        """
        self.bar = ProgressBar(total, start=self._counter.steps, title=self._title)
        self.bar.advance(0, values, steps=0)
        if self._measured is not None:
            self._measuring = Measuring(self._measured, total)
        self._open(self._counter.steps - 1)
        self._write(values, reported=reported)

    def _open(self, resumed_at: int) -> None:
        folder = self._folder()
        if folder is not None and self._metrics is None:
            self._metrics = Metrics(folder, resumed_at=resumed_at, trackers=self._trackers)
        early, self._early = self._early, []
        for epoch, when, values in early:  # the step was not known before the state was restored
            self._log(resumed_at, epoch, when, values)

    def committed(self, samples: int, values: Mapping[str, Any], *, reported: bool = False) -> None:
        """Report a later step: `samples` of all ranks, and its metrics."""
        if self.bar is not None:
            self.bar.advance(samples, values)
        self._write(values, reported=reported)

    def _write(self, values: Mapping[str, Any], *, reported: bool) -> None:
        counter = self._counter
        waited = False
        if self._metrics is not None and values:
            waited = self._metrics.write(counter.steps, counter.epoch, values, reported=reported)
        if self._measuring is not None:
            epoch, epochs = self._counted(counter.epoch)
            self._measuring.advance(counter.steps, epoch, values, epochs=epochs, waited=waited)
        if self._rank_log is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + FLUSH_EVERY
            self._take(self._rank_log.take())

    def _counted(self, epoch: int) -> tuple[int, int]:
        """Return the epoch and the number of epochs as shown in the progress bar, counted from 1; 0: unknown."""
        epochs = self._counter.epochs or 0
        return (min(epoch + 1, epochs) if epochs else epoch), epochs

    # -- run.log

    def log(self, values: dict[str, Any]) -> None:
        """Report values, as returned by `held`, that belong to no step or to more than one."""
        counter, now = self._counter, time.time()
        if self.bar is None and counter.steps == counter.start:
            self._early.append((counter.epoch, now, values))
        elif self._rank:
            self._send(counter.steps, counter.epoch, now, values)
        else:
            self._log(counter.steps, counter.epoch, now, values)

    def _send(self, step: int, epoch: int, when: float, values: Mapping[str, Any]) -> None:
        """Send values to rank 0."""
        if self._rank_log is not None:
            (numbers,) = read([values])
            self._rank_log.add(LoggedRow(step, epoch, when, numbers, self._rank, self._rank_log.generation))

    def _send_early(self) -> None:
        early, self._early = self._early, []
        for epoch, when, values in early:
            self._send(self._counter.start, epoch, when, values)

    def _log(self, step: int, epoch: int, when: float, values: Mapping[str, Any]) -> None:
        self._logged[step, tuple(values)] = values
        if len(self._logged) > _REMEMBERED:
            del self._logged[next(iter(self._logged))]
        if self._metrics is not None:
            self._metrics.log(step, epoch, when, values)
        if self._measuring is not None:
            counted, epochs = self._counted(epoch)
            self._measuring.log(step, counted, values, epochs=epochs)

    def post(self) -> None:
        """Send the values that this rank has logged to rank 0, if any are waiting. Called after every step."""
        self._send_early()
        if self._rank_log is not None:
            self._rank_log.post()

    def _take(self, rows: list[LoggedRow], *, last: bool = False) -> None:
        """Write the values that other ranks have logged. A value that is equal to rank 0's is omitted: a script may
        call `run.log` on all ranks. Values that were logged before the group formed again, for a step that the training
        repeats, are omitted, too. What rank 0 had logged by then is in the file.
        """
        rows, self._held = [*self._held, *rows], []
        for row in rows:
            earlier = self._rank_log is not None and row.generation != self._rank_log.generation
            if earlier and row.step > self._counter.start:
                continue
            if row.step >= self._counter.steps and not last:  # rank 0 may still log the same
                self._held.append(row)
                continue
            (own,) = read([self._logged.get((row.step, tuple(row.values)), {})])
            if self._metrics is None or repr(own) == repr(row.values):  # repr: NaN is not equal to itself
                continue
            if not (earlier and self._metrics.has_logged(row.step, row.values)):
                self._metrics.log(row.step, row.epoch, row.time, row.values, rank=row.rank, earlier=earlier)
                if self._measuring is not None:
                    named = {f"{name}/rank {row.rank}": value for name, value in row.values.items()}
                    epoch, epochs = self._counted(row.epoch)
                    self._measuring.log(row.step, epoch, named, epochs=epochs)

    @property
    def _title(self) -> str:
        counter = self._counter
        return "" if counter.epochs is None else f"epoch {counter.epoch + 1}/{counter.epochs}"

    def epoch_begun(self) -> None:
        """Show the current epoch of the counter."""
        if self.bar is not None:
            self.bar.title = self._title

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which something else can be printed, above the bar."""
        return self.bar.aside() if self.bar is not None else contextlib.nullcontext()

    def settle(self) -> None:
        """Write metrics on a GPU that wait, before or after a loop over data: the next step may come much later."""
        if self._metrics is not None:
            self._metrics.settle()

    def flush(self) -> None:
        """Write the metrics so far."""
        if self._metrics is not None:
            self._metrics.flush()

    def finish(self) -> None:
        """Report the last logged values of all ranks, and send the agent the values of the last step."""
        if self._rank_log is not None and self._rank:
            self._send_early()
            self._rank_log.end()
        elif self._rank_log is not None:
            rows = self._rank_log.take_last()
            if rows or self._early:
                self._open(self._counter.steps)
            self._take(rows, last=True)
        if self._measuring is not None:
            self._measuring.close()

    def close(self, ending: Ending = "done") -> None:
        """Close the bar and the metrics files."""
        with contextlib.ExitStack() as stack:
            if self._early and not self._rank:
                self._open(self._counter.steps)
            if self._metrics is not None:
                stack.callback(self._metrics.close, ending)
            if self.bar is not None:
                stack.callback(self.bar.close)
