"""Runs beside each other: what each has measured, how fast it was, what it lost. From events, pure.

courses = [course("a", events_a), course("b", events_b)]
rows = table(courses)                      # ("steps/s", [Cell("10.2", None), Cell("11.1", 1.09)]), …
charts = [chart(courses, name, over="step") for name in shown(courses)]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from phalanx.contract import events
from phalanx.watch.charts.figures import number, seconds
from phalanx.watch.charts.plot import Series
from phalanx.watch.charts.svg import Chart, ChartMark
from phalanx.watch.model.curve import Curve
from phalanx.watch.model.run_model import RunModel

Over = Literal["step", "time"]
RATES = ("steps/s", "samples/s")
_APART = 0.05  # seconds
_MARKS = 200
_FEW = 5  # points that make a curve
_LOW = ("loss", "error", "perplexity", "nll")  # of such the lowest is the best, of others who knows


@dataclass(frozen=True)
class Course:
    """One of them."""

    run: str
    state: str
    ranks: int
    steps: int  # 0: none was seen
    seconds: float
    metric: str
    final: float | None  # of the metric; NaN: it was none in the end; None: it was never measured
    lowest: float | None
    highest: float | None
    rates: dict[str, float]  # medians of RATES while it went on, as far as they are known
    faults: int
    lost: float  # seconds
    goodput: float | None  # None: nothing is known of its steps
    curves: dict[str, list[tuple[int, float, float]]]  # step, seconds since it began, value
    marks: tuple[tuple[int, float, str, str], ...] = ()  # step, seconds, kind, text
    known: tuple[str, ...] = ()  # metrics that it has


@dataclass(frozen=True)
class ComparisonCell:
    text: str
    ratio: float | None = None  # to the first run


class Track:
    """A run as its events are seen, one after the other. `scene` is what is to be seen of it."""

    def __init__(self, run: str, *, metric: str = "loss") -> None:
        self.scene = RunModel()
        self._run = run
        self._metric = metric
        self._first: float | None = None  # when it began
        self._final: float | None = None
        self._lowest = math.inf
        self._highest = -math.inf
        self._step = 0
        self._faults = 0
        self._looked = False
        self._rates = Curve()  # steps a second, from what was measured alone
        self._before: tuple[int, float] | None = None
        self._marks: list[tuple[int, float, str, str]] = []

    def see(self, event: events.AnyEvent) -> None:
        self._first = event.time if self._first is None else self._first
        self.scene.see(event)
        match event:
            case events.ClusterSample():
                self._looked = True
            case events.MetricsMeasured():
                self._looked = True
                self._measured(event)
            case events.FaultEvent():
                self._faults += not event.joins
                self._mark(event.time, self._step, "recovered" if event.joins else "fault", event.reason)
            case events.Recovered():
                self._step = max(self._step, event.step)
                self._mark(event.time, event.step, "recovered", f"recovered in {event.seconds:.1f} s")
            case events.Restarted():
                self._mark(event.time, self._step, "recovered", f"started again after {event.seconds:.1f} s")

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
        """Not of every step: what is a few milliseconds apart says little."""
        if self._before is not None:
            step, when = self._before
            if event.step >= step and event.time - when < _APART:
                return
            if event.step > step and event.time > when:
                self._rates.add(event.step, event.time, (event.step - step) / (event.time - when))
        self._before = (event.step, event.time)

    def course(self, state: str = "") -> Course:
        scene = self.scene
        start = scene.started or self._first or 0.0
        known = tuple(name for name in scene.curves if name not in RATES)
        curves = {name: _onward(scene.curves[name], start, again=False) for name in known}
        for name in RATES:
            curve = scene.curves.get(name, Curve())
            if name == "steps/s" and sum(value > 0 for _, _, value in curve.points) < _FEW:
                curve = self._rates if self._rates.points else curve  # it was over before it was looked at
            if curve.points:
                curves[name] = _onward(curve, start, again=True)
        return Course(
            run=self._run,
            state=state or scene.state,
            ranks=scene.world_size,
            steps=max(self._step, scene.step, 0),
            seconds=max(0.0, (scene.ended or scene.now) - start),
            metric=self._metric,
            final=self._final,
            lowest=self._lowest if math.isfinite(self._lowest) else None,
            highest=self._highest if math.isfinite(self._highest) else None,
            rates={name: _usual(curves[name]) for name in RATES if name in curves},
            faults=self._faults,
            lost=scene.lost,
            goodput=scene.goodput if self._looked else None,
            curves=curves,
            marks=tuple(self._marks),
            known=known,
        )


def _usual(points: Sequence[tuple[int, float, float]]) -> float:
    """While it went on: what stands still is told elsewhere."""
    return median([value for _, _, value in points if value > 0] or [0.0])


def _onward(curve: Curve, start: float, *, again: bool) -> list[tuple[int, float, float]]:
    """What was lost in a fault and made again is there once, as it was made in the end. `again`: a step may be there
    more than once, because it took long."""
    told: list[tuple[int, float, float]] = []
    for step, when, value in curve.points:
        while told and (told[-1][0] > step or (told[-1][0] == step and not again)):
            told.pop()
        told.append((step, when - start, value))
    return told


def shown(courses: Sequence[Course]) -> list[str]:
    """What there is a chart of: the metric, and rates, where anybody has them."""
    names = dict.fromkeys([courses[0].metric, *RATES])
    return [name for name in names if any(course.curves.get(name) for course in courses)]


def chart(courses: Sequence[Course], name: str, *, over: Over = "step", log: bool = False) -> Chart:
    """Marks are those of a single run: of several nobody could tell whose they are."""
    series = [
        Series(
            course.run,
            [(step if over == "step" else when, value) for step, when, value in course.curves.get(name, ())],
        )
        for course in courses
    ]
    marks = [
        ChartMark(step if over == "step" else when, text, kind)
        for step, when, kind, text in (courses[0].marks if len(courses) == 1 else ())
    ]
    return Chart(
        name,
        series,
        over="count" if over == "step" else "seconds",
        log=log and name not in RATES,
        across="step" if over == "step" else "time since it began",
        marks=marks,
        zero=name in RATES,
    )


def table(courses: Sequence[Course]) -> list[tuple[str, list[ComparisonCell]]]:
    """A row a fact, a cell a run; what is known of nobody is left out."""
    metric = courses[0].metric
    rows: list[tuple[str, list[ComparisonCell]]] = [
        ("state", [ComparisonCell(each.state) for each in courses]),
        ("ranks", [ComparisonCell(str(each.ranks)) for each in courses]),
        ("steps", _numbers([float(each.steps) or None for each in courses], whole=True)),
        (f"final {metric}", _numbers([each.final for each in courses])),
        (f"lowest {metric}", _numbers([each.lowest for each in courses])),
    ]
    if not any(word in metric.lower() for word in _LOW):
        rows.append((f"highest {metric}", _numbers([each.highest for each in courses])))
    rows += [(name, _numbers([each.rates.get(name) for each in courses])) for name in RATES]
    rows += [
        ("time", _ratios([each.seconds for each in courses], [seconds(each.seconds) for each in courses])),
        ("faults", [ComparisonCell(str(each.faults)) for each in courses]),
        ("time lost", [ComparisonCell(seconds(each.lost)) for each in courses]),
        ("goodput", [ComparisonCell("-" if each.goodput is None else f"{each.goodput:.1%}") for each in courses]),
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
        # of numbers that are not above 0 a ratio says nothing
        cells.append(ComparisonCell(text, value / first if known and first > 0 <= value else None))  # type: ignore[operator]
    return cells
