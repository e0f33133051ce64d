"""Curves as SVG that follows the light or dark mode of the reader. Pure.

    text = svg.picture([Chart("loss", [Series("a", [(0, 2.3), (1, 1.9)])], marks=[ChartMark(1, "rank 3 was killed")])])

A file contains its own style sheet; a page with several charts includes `style()` once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as _escaped

from phalanx.watch.charts.axis import Axis, Kind, placed, spanning
from phalanx.watch.charts.plot import Series

WIDTH, HEIGHT = 880, 260  # of a chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 34, 40
_LETTER = 6.6  # approximate width
_LONGEST = 60  # characters of a name

# (light, dark). Distinguishable with colour blindness, on white and on black.
COLOURS = (
    ("#2a6fdb", "#6ea8ff"),
    ("#d9661f", "#ff9d5c"),
    ("#178a5b", "#4fd39a"),
    ("#a63aa8", "#e08ae2"),
    ("#8a6d00", "#d8b93a"),
    ("#0b8193", "#4ccbdd"),
    ("#b3264a", "#ff7f9f"),
    ("#5a5f6b", "#b4bac7"),
)


@dataclass(frozen=True)
class ChartMark:
    """An event at a position on the x axis."""

    x: float
    text: str
    kind: str = ""  # "recovered" is drawn in green, everything else in red


@dataclass(frozen=True)
class Chart:
    """A chart with one or more curves."""

    title: str
    series: Sequence[Series]
    over: Kind = "count"
    log: bool = False
    across: str = "step"  # label of the x axis
    marks: Sequence[ChartMark] = ()
    zero: bool = False  # include 0 in the y axis


@dataclass(frozen=True)
class _Field:
    """The area that a chart is drawn on."""

    across: Axis
    up: Axis
    wide: int
    high: int

    def at(self, x: float, y: float) -> tuple[float, float] | None:
        across, up = self.across.at(x), self.up.at(y)
        return None if across is None or up is None else (across * self.wide, (1 - up) * self.high)


def style() -> str:
    """Return the style sheet. All classes begin with `ph-`."""
    light = "".join(f".ph-s{index}{{stroke:{one}}}.ph-f{index}{{fill:{one}}}" for index, (one, _) in enumerate(COLOURS))
    dark = "".join(f".ph-s{index}{{stroke:{one}}}.ph-f{index}{{fill:{one}}}" for index, (_, one) in enumerate(COLOURS))
    return (
        ".ph{font:12px system-ui,sans-serif}"
        ".ph text{fill:#4a4f5a}.ph .ph-title{font-weight:600;font-size:13px;fill:#1a1d24}"
        ".ph .ph-paper{fill:#fff}.ph .ph-grid{stroke:#e4e6ea}.ph .ph-axis{stroke:#9aa0ab}"
        ".ph .ph-line{fill:none;stroke-width:1.6;stroke-linejoin:round}.ph .ph-dot{stroke:none}"
        ".ph .ph-mark{stroke:#b3264a;stroke-dasharray:3 3}.ph .ph-flag{fill:#b3264a}"
        ".ph .ph-calm{stroke:#178a5b}.ph .ph-calmflag{fill:#178a5b}"
        f"{light}"
        "@media (prefers-color-scheme:dark){"
        ".ph text{fill:#a9b0bd}.ph .ph-title{fill:#e8eaee}"
        ".ph .ph-paper{fill:#14161b}.ph .ph-grid{stroke:#2a2e37}.ph .ph-axis{stroke:#626977}"
        ".ph .ph-mark{stroke:#ff7f9f}.ph .ph-flag{fill:#ff7f9f}"
        ".ph .ph-calm{stroke:#4fd39a}.ph .ph-calmflag{fill:#4fd39a}"
        f"{dark}}}"
    )


def picture(
    charts: Sequence[Chart], *, width: int = WIDTH, height: int = HEIGHT, alone: bool = True, comment: str = ""
) -> str:
    """Return the charts one below the other.

    `alone`: a separate file, else part of a page that has the style sheet. `comment`: a description.
    """
    whole = max(1, len(charts)) * height
    title = _text(", ".join(chart.title for chart in charts))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ph" viewBox="0 0 {width} {whole}"'
        + (f' width="{width}" height="{whole}"' if alone else "")
        + f' role="img" aria-label="{title}">'
    )
    parts = [head, f"<desc>{_text(comment)}</desc>" if comment else "", f"<style>{style()}</style>" if alone else ""]
    parts.append(f'<rect class="ph-paper" width="{width}" height="{whole}"/>')
    parts += [_chart(chart, number * height, width, height) for number, chart in enumerate(charts)]
    return "".join(parts) + "</svg>\n"


def _chart(chart: Chart, top: int, width: int, height: int) -> str:
    known = [(x, y) for one in chart.series for x, y in one.points if placed(x) and placed(y)]
    heights = [*(y for _, y in known), *([0.0] if chart.zero else [])]
    field = _Field(
        spanning((x for x, _ in known), chart.over),
        spanning(heights, "log" if chart.log else "number"),
        width - _LEFT - _RIGHT,
        height - _TOP - _BOTTOM,
    )
    parts = [f'<g transform="translate({_LEFT} {top + _TOP})">']
    parts.append(f'<text class="ph-title" x="0" y="-16">{_text(chart.title)}</text>')
    parts += [_legend(chart, field.wide), _grid(field, chart.across)]
    parts += [_mark(mark, field) for mark in chart.marks]
    for index in reversed(range(len(chart.series))):
        parts.append(_line(chart.series[index], index % len(COLOURS), field))
    if not known:
        parts.append(f'<text x="{field.wide / 2:g}" y="{field.high / 2:g}" text-anchor="middle">no data</text>')
    return "".join([*parts, "</g>"])


def _grid(field: _Field, name: str) -> str:
    across, up, wide, high = field.across, field.up, field.wide, field.high
    parts = []
    for value, text in up.ticks(6):
        place = up.at(value)
        if place is None or not -1e-9 <= place <= 1 + 1e-9:
            continue
        y = _short(high * (1 - place))
        parts.append(f'<path class="ph-grid" d="M0 {y}H{wide}"/>')
        parts.append(f'<text x="-8" y="{y}" dy="4" text-anchor="end">{_text(text)}</text>')
    free = -math.inf
    for value, text in across.ticks(10):
        place = across.at(value)
        if place is None or not -1e-9 <= place <= 1 + 1e-9 or wide * place - len(text) * _LETTER / 2 < free:
            continue
        x = wide * place
        free = x + len(text) * _LETTER / 2 + 8
        parts.append(f'<path class="ph-axis" d="M{_short(x)} {high}v4"/>')
        parts.append(f'<text x="{_short(x)}" y="{high + 17}" text-anchor="middle">{_text(text)}</text>')
    parts.append(f'<path class="ph-axis" d="M0 {high}H{wide}"/>')
    parts.append(f'<text x="{wide}" y="{high + 33}" text-anchor="end">{_text(name)}</text>')
    return "".join(parts)


def _legend(chart: Chart, wide: int) -> str:
    """Draw from the right. Long names are cut to the available width."""
    if len(chart.series) < 2:
        return ""
    parts, right = [], float(wide)
    most = int((wide - len(chart.title) * _LETTER - 20) / len(chart.series) / _LETTER) - 6
    for index in reversed(range(len(chart.series))):
        name = _cut(chart.series[index].name, max(4, min(_LONGEST, most)))
        left = right - len(name) * _LETTER - 22
        colour = index % len(COLOURS)
        parts.append(f'<path class="ph-line ph-s{colour}" d="M{_short(left)} -20h14"/>')
        parts.append(f'<text x="{_short(left + 18)}" y="-16">{_text(name)}</text>')
        right = left - 12
    return "".join(parts)


def _line(series: Series, colour: int, field: _Field) -> str:
    """Draw a curve with gaps where a value is missing. A single point between two gaps is a dot."""
    path, alone = [], []
    for piece in _pieces(series, field):
        if len(piece) == 1:
            alone.append(
                f'<circle class="ph-dot ph-f{colour}" cx="{_short(piece[0][0])}" cy="{_short(piece[0][1])}" r="2"/>'
            )
        else:
            path.append("M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in piece))
    line = f'<path class="ph-line ph-s{colour}" d="{"".join(path)}"/>' if path else ""
    return line + "".join(alone[:200])


def _pieces(series: Series, field: _Field) -> list[list[tuple[float, float]]]:
    """Return the connected parts. Of many points in one pixel column: the first, lowest, highest and last."""
    pieces: list[list[tuple[float, float]]] = []
    column: list[tuple[float, float]] = []
    open_piece = False

    def settle() -> None:
        nonlocal column
        if column:
            ends = {column[0], column[-1], min(column, key=lambda at: at[1]), max(column, key=lambda at: at[1])}
            pieces[-1].extend(at for at in column if at in ends)
        column = []

    for x, y in series.points:
        at = field.at(x, y)
        if at is None:
            settle()
            open_piece = False
            continue
        if not open_piece:
            pieces.append([])
            open_piece = True
        if column and int(at[0]) != int(column[0][0]):
            settle()
        column.append(at)
    settle()
    return pieces


def _mark(mark: ChartMark, field: _Field) -> str:
    place = field.across.at(mark.x)
    if place is None or not 0 <= place <= 1:
        return ""
    x = _short(place * field.wide)
    calm = mark.kind == "recovered"
    line, flag = ("ph-mark ph-calm", "ph-calmflag") if calm else ("ph-mark", "ph-flag")
    return (
        f'<g><title>{_text(_cut(mark.text, 300))}</title><path class="{line}" d="M{x} 0V{field.high}"/>'
        f'<path class="{flag}" d="M{x} -7l5 7h-10z"/></g>'
    )


def _text(text: str) -> str:
    """Escape for HTML and XML, without control characters, which XML does not allow."""
    return _escaped("".join(char if char.isprintable() else " " for char in text))


def _cut(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
