"""A terminal that stands still: the lines of the screen (watch/screen) as an SVG picture. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.watch.screen import text
from phalanx.watch.screen.text import Line

_CELL, _ROW, _EDGE = 8.4, 18, 14  # pixels
_BACK, _FORE = "#16181d", "#d5d9e0"
_SPACE = "\xa0"  # one that is never taken for less
# As paint.py has them for a terminal.
_COLOURS = {
    "dim": "#7c8494",
    "good": "#5fc98b",
    "warn": "#e0b04a",
    "bad": "#ff6b6b",
    "info": "#5ac8d8",
    "odd": "#d68ae0",
    "data": "#e0b04a",
    "compute": "#5fc98b",
    "wait": "#6ea0ff",
    "curve": "#5ac8d8",
}


def picture(lines: Sequence[Line], columns: int) -> str:
    width, height = round(columns * _CELL + 2 * _EDGE), len(lines) * _ROW + 2 * _EDGE
    rows = "\n".join(_row(line, number) for number, line in enumerate(lines))
    font = 'font-family="\'DejaVu Sans Mono\', Menlo, Consolas, monospace" font-size="14"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{_BACK}"/>\n'
        f'<g {font} fill="{_FORE}">\n{rows}\n</g>\n</svg>\n'
    )


def _row(line: Line, number: int) -> str:
    """Each piece at its own column and exactly as wide as its cells: a font may lack a sign and borrow a wider one."""
    top, at, parts = _EDGE + number * _ROW, 0, []
    for piece, named in line:
        cells = text.width(piece)
        left, wide = _EDGE + at * _CELL, cells * _CELL
        at += cells
        names = named.split()
        ink = next((_COLOURS[name] for name in names if name in _COLOURS), _FORE)
        if "chosen" in names:
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{_ROW}" fill="{ink}"/>')
            ink = _BACK
        if piece.strip():
            bold = ' font-weight="bold"' if {"bold", "bad"} & set(names) else ""
            place = f'x="{left:.1f}" y="{top + 13}" textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f'<text {place} fill="{ink}"{bold}>{escape(piece).replace(" ", _SPACE)}</text>')
    return "".join(parts)
