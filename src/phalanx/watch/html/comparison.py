"""Compares runs: metrics, speed, lost time. Pure, from events.

runs = [builder_a.build(), builder_b.build()]
rows = table(runs)                      # ("steps/s", [ComparisonCell("10.2"), ComparisonCell("11.1", 1.09)]), …
charts = [chart(runs, name, over="step") for name in shown(runs)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from phalanx.contract import events
from phalanx.watch.charts.formatting import number, seconds
from phalanx.watch.charts.plot import Series
from phalanx.watch.charts.svg import Chart, ChartMark
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.series.curve import Curve
from phalanx.watch.model.series.resources import RESOURCES

Over = Literal["step", "time"]
RATES = ("steps/s", "samples/s")
_APART = 0.05  # seconds
_MARKS = 200
_FEW = 5  # fewer points are not a curve
_LOW = ("loss", "error", "perplexity", "nll")  # metrics whose lowest value is the best


@dataclass(frozen=True)
class ComparedRun:
    """One run, as it is compared with others."""

    run: str
    state: str
    ranks: int
    steps: int  # 0: none was seen
    seconds: float
    metric: str
    final: float | None  # value of the metric; NaN: not finite; None: never reported
    lowest: float | None
    highest: float | None
    rates: dict[str, float]  # medians of RATES while it made progress
    faults: int
    lost: float  # seconds
    goodput: float | None  # None: unknown, or no step was made
    curves: dict[str, list[tuple[int, float, float]]]  # step, seconds since the start, value
    marks: tuple[tuple[int, float, str, str], ...] = ()  # step, seconds, kind, text

    @property
    def known(self) -> tuple[str, ...]:
        """The metrics that it has reported."""
        return tuple(name for name in self.curves if name not in (*RATES, *RESOURCES))


@dataclass(frozen=True)
class ComparisonCell:
    """A value, and its ratio to that of the first run."""

    text: str
    ratio: float | None = None  # to the first run


class ComparedRunBuilder:
    """Makes a `ComparedRun` of the events of a run. `model` is the state of the run."""

    def __init__(self, run: str, *, metric: str = "loss") -> None:
        self.model = RunModel()
        self._run = run
        self._metric = metric
        self._first: float | None = None  # time of the first event
        self._final: float | None = None
        self._lowest = math.inf
        self._highest = -math.inf
        self._step = 0
        self._faults = 0
        self._looked = False
        self._rates = Curve()  # steps per second, computed from the metrics
        self._before: tuple[int, float] | None = None
        self._marks: list[tuple[int, float, str, str]] = []

    def apply(self, event: events.AnyEvent) -> None:
        """Fold an event."""
        self._first = event.time if self._first is None else self._first
        self.model.apply(event)
        match event:
            case events.ClusterSample():
                self._looked = True
            case events.MetricsMeasured():
                self._looked = True
                self._measured(event)
            case events.FaultEvent():
                joined = event.kind == "node-joined"
                self._faults += not joined
                self._mark(event.time, self._step, "recovered" if joined else "fault", event.reason)
            case events.Recovered():
                self._step = max(self._step, event.step)
                self._mark(event.time, event.step, "recovered", f"recovered in {event.seconds:.1f} s")
            case events.Restarted():
                self._mark(event.time, self._step, "recovered", f"restarted after {event.seconds:.1f} s")

    def _mark(self, when: float, step: int, kind: str, text: str) -> None:
        if len(self._marks) < _MARKS:
            self._marks.append((max(step, 0), when - (self._first or when), kind, text))

    def _measured(self, event: events.MetricsMeasured) -> None:
        self._step = max(self._step, event.step)
        self._rate(event)
        if self._metric in event.values:
            value = event.values[self._metric]
            self._final = math.nan if value is None else value
            if value is not None:
                self._lowest, self._highest = min(self._lowest, value), max(self._highest, value)

    def _rate(self, event: events.MetricsMeasured) -> None:
        """Compute steps per second. Not for every step: intervals of milliseconds are too noisy."""
        if self._before is not None:
            step, when = self._before
            if event.step >= step and event.time - when < _APART:
                return
            if event.step > step and event.time > when:
                self._rates.add(event.step, event.time, (event.step - step) / (event.time - when))
        self._before = (event.step, event.time)

    def build(self, state: str = "") -> ComparedRun:
        """Return the result. `state`: replaces the state that the events report."""
        model = self.model
        start = model.run.started or self._first or 0.0
        reported = {name: curve for name, curve in model.progress.curves.items() if name not in RATES}
        curves = {name: _onward(curve, start, repeats=False) for name, curve in reported.items()}
        for name in RATES:
            curve = model.progress.curves.get(name, Curve())
            if name == "steps/s" and sum(value > 0 for _, _, value in curve.points) < _FEW:
                curve = self._rates if self._rates.points else curve  # a short run has no samples
            if curve.points:
                curves[name] = _onward(curve, start, repeats=True)
        resources = {name: _onward(curve, start, repeats=True) for name, curve in model.resources.curves.items()}
        curves = {**resources, **curves}
        return ComparedRun(
            run=self._run,
            state=state or model.run.state,
            ranks=model.ranks.world_size,
            steps=max(self._step, model.progress.step, 0),
            seconds=max(0.0, (model.run.ended or model.now) - start),
            metric=self._metric,
            final=self._final,
            lowest=self._lowest if math.isfinite(self._lowest) else None,
            highest=self._highest if math.isfinite(self._highest) else None,
            rates={name: _usual(curves[name]) for name in RATES if name in curves},
            faults=self._faults,
            lost=model.lost,
            goodput=model.goodput if self._looked and model.progress.step >= 0 else None,
            curves=curves,
            marks=tuple(self._marks),
        )


def _usual(points: Sequence[tuple[int, float, float]]) -> float:
    """Return the median of the points at which the step has increased: during a stall, the rate only falls."""
    grown = [value for (before, *_), (step, _, value) in itertools.pairwise(points) if value > 0 and step > before]
    return median(grown or [value for *_, value in points if value > 0] or [0.0])


def _onward(curve: Curve, start: float, *, repeats: bool) -> list[tuple[int, float, float]]:
    """Drop points of steps that were computed again. `repeats`: keep several points of the same step."""
    points: list[tuple[int, float, float]] = []
    for step, when, value in curve.points:
        while points and (points[-1][0] > step or (points[-1][0] == step and not repeats)):
            points.pop()
        points.append((step, when - start, value))
    return points


def shown(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of the charts: the metric and the rates that any run has."""
    names = dict.fromkeys([runs[0].metric, *RATES])
    return [name for name in names if any(run.curves.get(name) for run in runs)]


def chart(runs: Sequence[ComparedRun], name: str, *, over: Over = "step", log: bool = False) -> Chart:
    """Return a chart of all runs. Marks are drawn only for a single run."""
    series = [
        Series(
            run.run,
            [(step if over == "step" else when, value) for step, when, value in run.curves.get(name, ())],
        )
        for run in runs
    ]
    marks = [
        ChartMark(step if over == "step" else when, text, kind)
        for step, when, kind, text in (runs[0].marks if len(runs) == 1 else ())
    ]
    return Chart(
        name,
        series,
        over="count" if over == "step" else "seconds",
        log=log and name not in RATES,
        across="step" if over == "step" else "time since the start",
        marks=marks,
        zero=name in (*RATES, *RESOURCES),
    )


def table(runs: Sequence[ComparedRun]) -> list[tuple[str, list[ComparisonCell]]]:
    """Return one row per fact and one cell per run. Rows without any value are left out."""
    metric = runs[0].metric
    rows: list[tuple[str, list[ComparisonCell]]] = [
        ("state", [ComparisonCell(each.state) for each in runs]),
        ("ranks", [ComparisonCell(str(each.ranks)) for each in runs]),
        ("steps", _numbers([float(each.steps) or None for each in runs], whole=True)),
        (f"final {metric}", _numbers([each.final for each in runs])),
        (f"lowest {metric}", _numbers([each.lowest for each in runs])),
    ]
    if not any(word in metric.lower() for word in _LOW):
        rows.append((f"highest {metric}", _numbers([each.highest for each in runs])))
    rows += [(name, _numbers([each.rates.get(name) for each in runs])) for name in RATES]
    rows += [
        ("time", _ratios([each.seconds for each in runs], [seconds(each.seconds) for each in runs])),
        ("faults", [ComparisonCell(str(each.faults)) for each in runs]),
        ("time lost", [ComparisonCell(seconds(each.lost)) for each in runs]),
        ("goodput", [ComparisonCell("-" if each.goodput is None else f"{each.goodput:.1%}") for each in runs]),
    ]
    return [(name, cells) for name, cells in rows if any(cell.text != "-" for cell in cells)]


def _numbers(values: Sequence[float | None], *, whole: bool = False) -> list[ComparisonCell]:
    texts = []
    for value in values:
        if value is None:
            texts.append("-")
        else:
            texts.append(f"{value:.0f}" if whole else number(value))
    return _ratios(values, texts)


def _ratios(values: Sequence[float | None], texts: Sequence[str]) -> list[ComparisonCell]:
    first, cells = values[0], [ComparisonCell(texts[0])]
    for value, text in zip(values[1:], texts[1:], strict=True):
        known = first is not None and value is not None and math.isfinite(first) and math.isfinite(value)
        # a ratio needs positive numbers
        cells.append(ComparisonCell(text, value / first if known and first > 0 <= value else None))  # type: ignore[operator]
    return cells
