"""Turns lines into terminal output: only changed lines, in one write."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from phalanx.watch.screen.terminal import text
from phalanx.watch.screen.terminal.text import Line

_SGR = {
    "bold": "1",
    "dim": "2",
    "chosen": "7",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "info": "36",
    "odd": "35",
    "data": "33",
    "compute": "32",
    "wait": "34",
    "curve": "36",
}
_NO_COLOUR = {"bad": "1", "bold": "1", "dim": "2", "chosen": "7"}

_BEGIN, _END = b"\x1b[?2026h", b"\x1b[?2026l"  # synchronized update


class Painter:
    """Keeps the contents of the screen."""

    def __init__(self, *, colour: bool, ascii_only: bool) -> None:
        self._codes = _SGR if colour else _NO_COLOUR
        self._ascii = ascii_only
        self._painted: list[bytes] = []
        self._sgr = functools.cache(self._look_up)

    def forget(self) -> None:
        """Paint the next frame completely."""
        self._painted = []

    def frame(self, lines: Sequence[Line], width: int, height: int) -> bytes:
        """Return the bytes that make the screen show these lines; empty if it already does."""
        rows = [self._row(line, width) for line in lines[:height]]
        rows += [b"\x1b[K"] * (height - len(rows))
        whole = len(self._painted) != len(rows)
        old = [b""] * len(rows) if whole else self._painted
        changed = [
            b"\x1b[%d;1H%b" % (at, new) for at, (new, was) in enumerate(zip(rows, old, strict=True), 1) if new != was
        ]
        self._painted = rows
        if not changed:
            return b""
        return b"".join((_BEGIN, b"\x1b[0m\x1b[2J" if whole else b"", *changed, _END))

    def _row(self, line: Line, width: int) -> bytes:
        parts: list[str] = []
        style = ""
        # Clean everything here: only this module may write control characters.
        line = [(text.clean(piece), named) for piece, named in line]
        for piece, named in text.clip(line, width):
            code = self._sgr(named)
            if code != style:
                parts.append(f"\x1b[0;{code}m" if code else "\x1b[0m")
                style = code
            parts.append(piece)
        if style:
            parts.append("\x1b[0m")
        if text.length(line) < width:  # after the last column this would erase it
            parts.append("\x1b[K")
        row = "".join(parts)
        if not row.isascii():
            if self._ascii:
                row = "".join(c if c.isascii() else "?" * text.width(c) for c in row)
            return row.encode(errors="replace")
        return row.encode()

    def _look_up(self, named: str) -> str:
        return ";".join(filter(None, (self._codes.get(name, "") for name in named.split())))
