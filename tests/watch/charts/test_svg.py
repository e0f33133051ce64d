"""Curves as a picture: well-formed, escaped, and bounded however much was measured."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from phalanx.watch.charts import svg, timeline
from phalanx.watch.charts.plot import Series
from phalanx.watch.charts.svg import Chart, ChartMark
from phalanx.watch.model.incidents import Incident
from phalanx.watch.model.rank import RankView

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert(1)</script>\"'&\x1b[31m\x00"


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_a_picture_is_xml_and_holds_what_it_was_given() -> None:
    series = [Series("first", [(0, 1.0), (10, 0.5)]), Series("second", [(0, 2.0), (5, 1.0)])]
    chart = Chart(
        "loss",
        series,
        marks=[ChartMark(5, "rank 1 was killed"), ChartMark(6, "back", "recovered"), ChartMark(99, "outside")],
    )
    root = parsed(svg.picture([chart, Chart("steps/s", [Series("a", [(0, 3.0)])], zero=True)]))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"loss", "steps/s", "first", "second", "step"} <= set(texts)
    assert [each.text for each in root.iter(f"{SVG}title")] == ["rank 1 was killed", "back"]
    lines = [each.get("d", "") for each in root.iter(f"{SVG}path") if "ph-s" in each.get("class", "")]
    assert len([line for line in lines if "L" in line]) == 2
    assert len(list(root.iter(f"{SVG}circle"))) == 1  # a single point is a dot
    assert "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")


def test_text_of_others_cannot_become_markup() -> None:
    chart = Chart(EVIL, [Series(EVIL, [(0, 1)]), Series(EVIL, [(0, 1)])], across=EVIL, marks=[ChartMark(0, EVIL)])
    drawing = svg.picture([chart], comment=EVIL)
    assert not list(parsed(drawing).iter(f"{SVG}script"))
    whole = timeline.whole(0.0, 1.0, 10.0, [Incident(2.0, "fault", EVIL, seconds=1.0)])
    assert not list(parsed(whole).iter(f"{SVG}script"))


def test_gaps_break_the_line_and_nothing_is_said_to_be_nothing() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0), (5, 2.0), (math.nan, 1.0)]
    root = parsed(svg.picture([Chart("loss", [Series("a", points)])]))
    line = next(each.get("d", "") for each in root.iter(f"{SVG}path") if "ph-s0" in each.get("class", ""))
    assert line.count("M") == 2
    assert "no data" in svg.picture([Chart("loss", [])])


def test_many_points_are_a_small_picture_with_every_peak() -> None:
    points = [(float(step), 100.0 if step == 33_333 else math.sin(step)) for step in range(60_000)]
    drawing = svg.picture([Chart("loss", [Series("a", points)])])
    assert len(drawing) < 80_000
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", drawing)]
    assert min(heights) == 0.0  # the peak


def test_phases_of_many_ranks_are_a_few_paths() -> None:
    views = []
    for rank in range(100):
        view = RankView(rank)
        view.activity.strip.add(60.0, "ddffffbbbwwO" * 50)
        views.append(view)
    root = parsed(timeline.ranks(views))
    strips = [each for each in root.iter(f"{SVG}path") if "ph-strip" in each.get("class", "")]
    assert {each.get("class", "").rpartition("-")[2] for each in strips} == {
        "data",
        "forward",
        "backward",
        "collective",
        "optimizer",
    }
    assert timeline.ranks([RankView(0)]) == ""
