"""Rank 0 sends metrics to its agent a few times per second, for viewers of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx.contract.messages.worker_messages import MeasuredStep
from phalanx.train.reporting.metrics import read

EVERY = 0.2  # seconds
# seconds, for the first step of an epoch, so that a rank that stalls there does not show the previous epoch
EPOCH_EVERY = 0.05
READ_EVERY = 2.0  # seconds, for values on a GPU that nothing else has just synchronised
_MOST = 64  # values per message, which is one packet
_LONGEST = 100  # characters of a name


class _Row(NamedTuple):
    step: int
    epoch: int
    epochs: int
    values: Mapping[str, Any]


class Measuring:
    """Sends metrics. A step without a message only reads the clock."""

    def __init__(
        self, tell: Callable[[MeasuredStep], None], total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._total = total or 0
        self._clock = clock
        self._sent = -EVERY  # when values were sent
        self._step = self._epoch = 0  # of the values that were sent last
        self._read = 0.0  # when values on a GPU are due
        self._last: _Row | None = None  # not sent yet
        self._logged: dict[str, _Row] = {}  # by name: not sent yet

    def advance(
        self, step: int, epoch: int, values: Mapping[str, Any], *, epochs: int = 0, waited: bool = False
    ) -> None:
        """Send the values of a committed step, as returned by `metrics.held`, if it is time.

        `epoch` is counted from 1, like in the progress bar; 0: unknown. `waited`: the GPU was just synchronised, so
        reading from it is cheap.
        """
        self._last = _Row(step, epoch, epochs, values)
        now = self._clock()
        if epoch == self._epoch or now < self._sent + EPOCH_EVERY:
            if now < self._sent + EVERY:
                return
            if not waited and now < self._read and any(type(value) is not float for value in values.values()):
                return
        self._read = now + READ_EVERY
        self.close()

    def log(self, step: int, epoch: int, values: Mapping[str, Any], *, epochs: int = 0) -> None:
        """Send values that were logged, if it is time and none is on a GPU; else before the next step's, or at the end.

        A newer value of the same name replaces an older one.
        """
        self._logged.update(dict.fromkeys(values, _Row(step, epoch, epochs, values)))
        if self._last is None:
            self._last = _Row(max(step, self._step), epoch, epochs, {})
        waiting = (row.values[name] for name, row in self._logged.items())
        if self._clock() >= self._sent + EVERY and all(
            type(value) is float for value in (*waiting, *self._last.values.values())
        ):
            self.close()

    def close(self) -> None:
        """Send the newest values, if they were not sent yet. Each is sent with the step that it belongs to."""
        if self._last is None:
            return
        last, self._last = self._last, None
        logged, self._logged = self._logged, {}
        self._sent, self._epoch = self._clock(), last.epoch
        rows: dict[int, dict[str, Any]] = {}  # by step
        for name, row in list(logged.items())[:_MOST]:
            # What other ranks have logged arrives late. Steps that decrease would mean that they are computed again.
            rows.setdefault(max(row.step, self._step), {})[name] = row.values[name]
        rows[last.step] = {**rows.get(last.step, {}), **last.values}
        self._step = last.step
        steps = sorted(rows)
        for step, numbers in zip(steps, read([dict(list(rows[step].items())[:_MOST]) for step in steps]), strict=True):
            epoch = next((row.epoch for row in logged.values() if row.step == step), last.epoch)
            finite = {name[:_LONGEST]: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._tell(MeasuredStep(step=step, epoch=epoch, epochs=last.epochs, total=self._total, values=finite))
