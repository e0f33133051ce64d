"""The progress and speed of the training, from samples and reported metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.contract import events
from phalanx.watch.model.series.curve import Curve
from phalanx.watch.model.series.rate import Rate

STEPS, SAMPLES = "steps/s", "samples/s"  # curves that are computed here
_MOST_CURVES = 100  # a script may report any number of names


@dataclass
class Progress:
    """Steps, rates and curves of the training."""

    step: int = -1  # the highest step of any rank; it may decrease after a restart
    total: int = 0
    epoch: int = 0  # from 1; 0: unknown
    epochs: int = 0  # 0: unknown
    rate: float = 0.0  # steps per second
    samples: float = -1.0  # training samples per second of all ranks
    step_seconds: float = 0.0  # usual seconds per step
    curves: dict[str, Curve] = field(default_factory=dict)  # loss, …, "steps/s", "samples/s"
    _sampled_rate: Rate = field(default_factory=Rate)
    _measured: events.MetricsMeasured | None = None  # the latest one
    _measured_rate: Rate = field(default_factory=Rate)
    _step_resets: bool = False  # the training counts its steps from 0 more than once: use the sampled steps instead
    _ended: bool = False

    @property
    def eta(self) -> float | None:
        """Estimated seconds until the last step; None: unknown."""
        if self._ended or self._measured is None or self.total <= 0 or self.rate <= 0:
            return None
        return max(0, self.total - self._measured.step) / self.rate

    def sampled(self, now: float, furthest: int, samples: float, *, halted: bool, at_work: bool) -> None:
        """Fold a sample: the highest step of all ranks and their samples per second, -1 if unknown.

        `halted`: by a stall or a fault. `at_work`: some rank is running.
        """
        if furthest >= 0:
            self.step = furthest
            self._sampled_rate.record(now, furthest)
        reported = self._measured.samples if self._measured is not None else -1.0
        self.rate = self._sampled_rate.at(now) or self._measured_rate.at(now)
        self.samples = samples if samples >= 0 else reported
        if halted:  # the latest reported rate is out of date
            self.samples = min(0.0, self.samples)
        self.step_seconds = self._sampled_rate.each or self._measured_rate.each or self.step_seconds
        if self.step >= 0 and (at_work or halted):  # do not draw the rate falling at the end of the run
            if self.rate > 0 or halted:  # otherwise it is not known yet
                self._point(STEPS, self.step, now, self.rate)
            if self.samples >= 0:
                self._point(SAMPLES, self.step, now, self.samples)

    def measured(self, event: events.MetricsMeasured, *, running: bool) -> bool:
        """Fold reported metrics. Return whether their step is new."""
        before, self._measured = self._measured, event
        if before is not None and event.step < before.step and running:
            self._step_resets = True
        self.total, self.epoch = event.total or self.total, event.epoch
        self.epochs = event.epochs or self.epochs
        self._measured_rate.record(event.time, event.step)
        if not self._sampled_rate.marks:  # no steps in the samples
            self.step, self.rate, self.samples = event.step, self._measured_rate.at(event.time), event.samples
        step = self.step if self._step_resets else event.step
        for name, value in event.values.items():
            if value is not None and name not in (STEPS, SAMPLES):
                self._point(name, step, event.time, value)
        return before is None or event.step > before.step

    def apply(self, event: events.AnyEvent) -> None:
        """Fold any other event."""
        match event:
            case events.AttemptStarted() | events.Recovered():
                self._measured = None  # steps may be computed again
            case events.RunEnded():  # show the speed of the training
                self._ended = True
                self.rate = 1 / self.step_seconds if self.step_seconds else 0.0
                self.samples = self.curves[SAMPLES].last or 0.0 if SAMPLES in self.curves else self.samples

    def _point(self, name: str, step: int, when: float, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < _MOST_CURVES:
            curve = self.curves[name] = Curve()
        if curve is not None and math.isfinite(value):
            curve.add(step, when, value)
