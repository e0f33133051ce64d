"""Curves as text, drawn with braille dots or ASCII, with axes. Pure: the caller turns styles into colours.

    rows = plot.lines([Series("a", [(0, 2.3), (1, 1.9)]), Series("b", [(0, 2.2)])], width=60, height=12)
    for row in rows:
        print("".join(text for text, style in row))

Each row is a list of pieces (text, style) that are together exactly `width` cells wide. `style` is the index of the
series, or AXIS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.watch.charts.axis import Axis, Kind, placed, spanning

AXIS = -1
ASCII_DOTS = "*+xo#@%&"  # the series, in this order
_BRAILLE = 0x2800
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a dot in its cell: [row][column]

Piece = tuple[str, int]  # text, style
Row = list[Piece]


@dataclass(frozen=True)
class Series:
    """A named curve."""

    name: str
    points: Sequence[tuple[float, float]]  # x, y; a y that is not finite is a gap


@dataclass(frozen=True)
class _Signs:
    side: str = "│"
    tick: str = "┤"
    corner: str = "└"
    floor: str = "─"
    stand: str = "┬"
    mark: str = "▲"


_ASCII = _Signs(side="|", tick="+", corner="+", floor="-", stand="+", mark="^")


@dataclass
class _Canvas:
    """A grid of dots: 2 x 4 per cell with braille, one per cell with ASCII."""

    width: int
    height: int
    across: int
    down: int
    bits: dict[tuple[int, int], int] = field(default_factory=dict)  # row, column
    styles: dict[tuple[int, int], int] = field(default_factory=dict)

    def draw(self, points: Iterable[tuple[float, float] | None], style: int) -> None:
        """Draw a line through all points (0 to 1 each), interrupted at None."""
        last: tuple[int, int] | None = None
        low = high = 0  # of the current column: many points in one column cost the same as one
        for point in points:
            here = None if point is None else self._dot(*point)
            if last is not None and here is not None and here[0] == last[0]:
                low, high = min(low, here[1]), max(high, here[1])
            else:
                if last is not None:
                    self._line((last[0], low), (last[0], high), style)
                if here is not None:
                    self._line(here if last is None else last, here, style)
                    low = high = here[1]
            last = here
        if last is not None:
            self._line((last[0], low), (last[0], high), style)

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        columns, rows = self.width * self.across - 1, self.height * self.down - 1
        return min(columns, max(0, round(x * columns))), min(rows, max(0, round((1 - y) * rows)))

    def _line(self, start: tuple[int, int], end: tuple[int, int], style: int) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for step in range(steps + 1):
            share = step / steps
            x = round(start[0] + (end[0] - start[0]) * share)
            self._set(x, round(start[1] + (end[1] - start[1]) * share), style)

    def _set(self, x: int, y: int, style: int) -> None:
        cell = (y // self.down, x // self.across)
        self.bits[cell] = self.bits.get(cell, 0) | _BITS[y % self.down][x % self.across]
        self.styles[cell] = style

    def row(self, number: int, ascii_only: bool) -> Row:
        cells: Row = []
        for column in range(self.width):
            bits = self.bits.get((number, column))
            if bits is None:
                cells.append((" ", AXIS))
                continue
            style = self.styles[number, column]
            cells.append((ASCII_DOTS[style % len(ASCII_DOTS)] if ascii_only else chr(_BRAILLE + bits), style))
        return cells


def lines(
    series: Sequence[Series],
    width: int,
    height: int,
    *,
    ascii_only: bool = False,
    log: bool = False,
    zero: bool = False,
    over: Kind = "count",
    marks: Sequence[float] = (),
) -> list[Row]:
    """Return `height` rows of `width` cells. The first series is drawn on top.

    `zero`: include 0 in the y axis. `over`: what x is. `marks`: x positions of events. If there is no room for axes,
    only the curves are drawn.
    """
    if width < 1 or height < 1:
        return []
    signs = _ASCII if ascii_only else _Signs()
    drawn = [_known(one.points) for one in series]
    across = spanning((x for points in drawn for x, _ in points), over)
    heights = [y for points in drawn for _, y in points]
    up = spanning([*heights, *([0.0] if zero else [])], "log" if log else "number")
    floor = 2 if height >= 5 and width >= 16 else 0
    rows = height - floor
    labels = _side_labels(up, rows) if width >= 16 else {}
    margin = max(map(len, labels.values()), default=-1) + 1
    if width - margin < 8:
        labels, margin = {}, 0
    side = margin + 1 if floor or labels else 0
    canvas = _Canvas(width - side, rows, *((1, 1) if ascii_only else (2, 4)))
    for style in reversed(range(len(series))):
        canvas.draw((_place(across, up, x, y) for x, y in series[style].points), style)
    drawn_rows: list[Row] = []
    for number in range(rows):
        edge: Row = []
        if side:
            label = labels.get(number, "")
            edge = [(label.rjust(margin - 1) + " " * (margin > 0) + (signs.tick if label else signs.side), AXIS)]
        drawn_rows.append(_joined(edge + canvas.row(number, ascii_only)))
    if floor:
        drawn_rows += _floor(across, width, margin, signs, marks)
    return drawn_rows


def legend(series: Sequence[Series], *, ascii_only: bool = False) -> Row:
    """Return the names with their symbols, in one row."""
    row: Row = []
    for style, one in enumerate(series):
        row += [(f"{sign(style, ascii_only=ascii_only)} {one.name}", style), ("   ", AXIS)]
    return row[:-1]


def sign(style: int, *, ascii_only: bool = False) -> str:
    """Return the symbol of a series in a legend."""
    return ASCII_DOTS[style % len(ASCII_DOTS)] if ascii_only else "━━"


def _known(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if placed(x) and placed(y)]


def _place(across: Axis, up: Axis, x: float, y: float) -> tuple[float, float] | None:
    at = (across.at(x), up.at(y))
    return None if at[0] is None or at[1] is None else (at[0], at[1])


def _side_labels(up: Axis, rows: int) -> dict[int, str]:
    """Return the label of each row that has one."""
    labels: dict[int, str] = {}
    for value, text in up.ticks(max(2, rows // (2 if up.kind == "log" else 3))):
        place = up.at(value)
        if place is not None:
            labels.setdefault(min(rows - 1, max(0, round((1 - place) * (rows - 1)))), text)
    return labels


def _floor(across: Axis, width: int, margin: int, signs: _Signs, marks: Sequence[float]) -> list[Row]:
    """Return the x axis and the labels below it."""
    wide = width - margin - 1
    line, below = [signs.floor] * wide, [" "] * width
    free = 0
    for value, text in across.ticks(max(2, wide // 12)):
        place = across.at(value)
        if place is None:
            continue
        column = min(wide - 1, max(0, round(place * (wide - 1))))
        start = min(width - len(text), max(0, margin + 1 + column - len(text) // 2))
        if start < free:
            continue
        line[column] = signs.stand
        below[start : start + len(text)] = text
        free = start + len(text) + 1
    for mark in marks:
        place = across.at(mark)
        if place is not None and 0 <= place <= 1:
            line[round(place * (wide - 1))] = signs.mark
    return [[(" " * margin + signs.corner + "".join(line), AXIS)], [("".join(below), AXIS)]]


def _joined(cells: Row) -> Row:
    """Join neighbouring pieces of the same style."""
    row: Row = []
    for text, style in cells:
        if row and (row[-1][1] == style or text == " "):
            row[-1] = (row[-1][0] + text, row[-1][1])
        else:
            row.append((text, style))
    return row
