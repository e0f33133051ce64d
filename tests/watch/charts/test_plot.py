"""Curves as text, and the round numbers on their axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.watch.charts import axis, formatting, plot
from phalanx.watch.charts.axis import Axis, spanning
from phalanx.watch.charts.plot import AXIS, Series

FALLING = Series("a", [(step, 100 - step) for step in range(101)])
RISING = Series("b", [(step, step) for step in range(101)])


def text(rows: list[plot.Row]) -> list[str]:
    return ["".join(piece for piece, _ in row) for row in rows]


def test_a_falling_line_falls_and_has_round_numbers() -> None:
    assert text(plot.lines([FALLING], 26, 8, ascii_only=True)) == [
        "100 +***                  ",
        "    |  *****              ",
        " 50 +      *****          ",
        "    |          *****      ",
        "    |              *****  ",
        "  0 +                  ***",
        "    ++---------+---------+",
        "     0        50       100",
    ]


def test_every_series_has_its_style_and_the_first_lies_on_top() -> None:
    rows = plot.lines([FALLING, RISING], 40, 10)
    assert {style for row in rows for _, style in row} == {AXIS, 0, 1}
    assert [style for _, style in rows[0] if style != AXIS] == [0, 1]  # the falling one begins at the left
    alike = plot.lines([FALLING, FALLING], 40, 10)
    assert {style for row in alike for _, style in row} == {AXIS, 0}


numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.tuples(numbers, numbers), max_size=12), max_size=3),
    st.integers(1, 60),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["count", "number", "seconds"]),
)
def test_whatever_is_drawn_fills_exactly_its_place(
    points: list[list[tuple[float, float]]], width: int, height: int, ascii_only: bool, log: bool, over: axis.Kind
) -> None:
    series = [Series(str(index), each) for index, each in enumerate(points)]
    rows = plot.lines(series, width, height, ascii_only=ascii_only, log=log, over=over, zero=not log)
    assert [sum(len(piece) for piece, _ in row) for row in rows] == [width] * height
    if ascii_only:
        assert all(line.isascii() for line in text(rows))


def test_what_is_no_number_is_a_gap() -> None:
    series = Series("a", [(0, 1.0), (1, math.nan), (2, 1.0), (3, math.inf), (4, 1.0)])
    rows = text(plot.lines([series], 41, 3, ascii_only=True))
    assert sum(line.count("*") for line in rows) == 3


def test_plots_of_no_point_and_one_point() -> None:
    assert len(plot.lines([], 30, 8)) == 8
    rows = plot.lines([Series("a", [(5, 0.25)])], 30, 8)
    assert sum(style == 0 for row in rows for _, style in row) == 1
    assert "5" in text(rows)[-1]


def test_decades_are_equally_high_on_a_log_scale() -> None:
    series = Series("a", [(step, 10.0**-step) for step in range(5)] + [(5, 0.0), (6, -1.0)])
    rows = text(plot.lines([series], 40, 12, log=True))
    labels = [line.split("┤")[0].strip() for line in rows if "┤" in line]
    assert labels == ["1", "0.1", "0.01", "0.001", "0.0001"]


def test_marks_are_drawn_on_the_axis() -> None:
    assert text(plot.lines([RISING], 60, 8, marks=[50.0, 5000.0]))[-2].count("▲") == 1


@pytest.mark.parametrize(
    ("low", "high", "kind", "expected"),
    [
        (0, 1, "number", ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.1, 0.35, "number", ["0.10", "0.15", "0.20", "0.25", "0.30", "0.35"]),
        (0, 25000, "count", ["0", "5k", "10k", "15k", "20k", "25k"]),
        (0, 3, "count", ["0", "1", "2", "3"]),
        (0, 3600, "seconds", ["0s", "15m", "30m", "45m", "1h"]),
        (0, 200, "seconds", ["0s", "1m", "2m", "3m"]),
        (0.15, 2.3, "log", ["0.2", "0.5", "1", "2"]),
        (-1, 1, "number", ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        (1e6, 3e6, "number", ["1.0M", "1.5M", "2.0M", "2.5M", "3.0M"]),
    ],
)
def test_round_numbers(low: float, high: float, kind: axis.Kind, expected: list[str]) -> None:
    assert [label for _, label in Axis(low, high, kind).ticks(5)] == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True), min_size=1, max_size=5), st.sampled_from(["number", "log", "seconds", "count"])
)
def test_all_that_is_finite_has_a_place(values: list[float], kind: axis.Kind) -> None:
    made = spanning(values, kind)
    for value in values:
        place = made.at(value)
        known = abs(value) <= 1e100 and (kind != "log" or value >= 1e-100)
        assert (place is not None and -1e-6 <= place <= 1 + 1e-6) if known else place is None
    ticks = made.ticks(6)
    assert len(ticks) <= 10
    assert all(-1e-6 <= (made.at(value) or 0.0) <= 1 + 1e-6 for value, _ in ticks)


def test_labels_are_unlike_each_other() -> None:
    for low, high in [(100.1, 100.2), (1e-7, 3e-7), (12000, 12400), (0.0001, 0.0009), (1e9, 1.0001e9)]:
        labels = [label for _, label in Axis(low, high).ticks(5)]
        assert len(set(labels)) == len(labels) >= 2, labels


def test_numbers_are_written_the_same_everywhere() -> None:
    wanted = {
        0.0: "0",
        2.30123: "2.301",
        0.0008402: "0.00084",
        0.00008402: "8.4e-5",
        9999.6: "10k",
        15921.0: "15.9k",
        -20000.0: "-20k",
        999951.0: "1M",
        1.23e16: "1.23e16",
        float("nan"): "nan",
    }
    assert {value: formatting.number(value) for value in wanted} == wanted
    assert formatting.number(None) == "–"
