"""Styled text in terminal cells: its width, cut to a width, without control characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

Piece = tuple[str, str]  # text, and the names of its styles (paint.py)
Line = list[Piece]

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?", re.DOTALL)


def clean(text: str) -> str:
    """Return one line without colours, cursor movement and characters that hide or reverse text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in _ESCAPE.sub("", text).expandtabs() if c not in "\x07\x08\x7f")


def shown(text: str) -> str:
    """Return a line as it looks in the end: progress bars overwrite themselves."""
    return next((clean(part) for part in reversed(text.split("\r")) if part), "")


def width(text: str) -> int:
    """Return the number of cells."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(c: str) -> int:
    if c.isascii():
        return 1
    if unicodedata.category(c) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def cut(text: str, cells: int, dots: str = "…") -> str:
    """Return at most `cells` cells."""
    if cells <= 0:
        return ""
    if width(text) <= cells:
        return text
    dots = dots if cells > len(dots) else ""
    left, kept = cells - len(dots), 0
    for at, c in enumerate(text):
        kept += _cells(c)
        if kept > left:
            return text[:at] + dots
    return text


def fit(text: str, cells: int, *, right: bool = False, dots: str = "…") -> str:
    """Return exactly `cells` cells."""
    text = cut(text, cells, dots)
    blank = " " * (cells - width(text))
    return blank + text if right else text + blank


def length(line: Sequence[Piece]) -> int:
    """Return the number of cells of a line."""
    return sum(width(text) for text, _ in line)


def clip(line: Sequence[Piece], cells: int, *, fill: str | None = None) -> Line:
    """Return at most `cells` cells; exactly that number if `fill` is the style for the rest."""
    kept: Line = []
    left = cells
    for text, style in line:
        if left <= 0:
            break
        part = cut(text, left, "")
        if part:
            kept.append((part, style))
            left -= width(part)
        if part != text:
            break
    if fill is not None and left > 0:
        kept.append((" " * left, fill))
    return kept


def spread(left: Sequence[Piece], right: Sequence[Piece], cells: int) -> Line:
    """Return `left` and `right` at both ends; without `right` if there is no room."""
    free = cells - length(left) - length(right)
    if free < 1:
        return clip(left, cells)
    return [*left, (" " * free, ""), *right]


def wrap(text: str, cells: int) -> list[str]:
    """Return lines of at most `cells` cells. Continuation lines are indented."""
    if width(text) <= cells or cells < 8:
        return [cut(text, cells)]
    indent = " " * min(len(text) - len(text.lstrip()) + 2, cells // 2)
    lines, line = [], ""
    for word in re.split(r"(?<=\S)(?=\s)", text):
        if line.strip() and width(line) + width(word) > cells:
            lines.append(line)
            line = indent + word.lstrip()
        else:
            line += word
        while width(line) > cells:
            part = cut(line, cells, "")
            lines.append(part)
            line = indent + line[len(part) :]
    return [*lines, line]
