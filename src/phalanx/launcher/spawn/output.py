"""The output of the ranks of a `phalanx.spawn`, in a terminal, a file or the cell of a notebook.

Whole lines have the rank as a prefix. A progress bar of rank 0 is redrawn in place, if possible: on a terminal below
the lines of all ranks, in a notebook above them. Otherwise its last state is printed at the end.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, TextIO

from phalanx.launcher.output.console.line_model import LineModel, columns
from phalanx.launcher.output.console.noise import Noise

_CELL_WIDTH = 100  # columns of a bar in a notebook: ranks draw 80, and a prefix is added
_LIMIT = 1 << 16  # bytes of a line, before a part of it is shown


def shows_bars(stream: TextIO | None) -> bool:
    """Return whether a stream can redraw a line: a terminal, or the cell of a notebook."""
    if _is_cell(stream):
        return True
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # replaced by the script, or closed
        return False


def _is_cell(stream: TextIO | None) -> bool:
    return type(stream).__module__.startswith("ipykernel.")


class CellArea:
    """A place in the output of a notebook's cell that is redrawn.

    Lines of stdout and stderr are separate outputs of a cell, so a bar between them could not be removed: every line
    would leave an empty row.
    """

    def __init__(self) -> None:
        self._shown = ""
        self._handle: Any = None

    def draw(self, text: str) -> None:
        """Show a text instead of the last one."""
        if text == self._shown:
            return
        self._shown = text
        data = {"text/plain": text}
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class RankOutput:
    """Prints the output of all ranks to stdout (stream 0) and stderr (1)."""

    def __init__(self, ranks: int) -> None:
        digits = len(str(ranks - 1))
        self._prefixes = [f"[{rank:>{digits}}] " for rank in range(ranks)]
        self._models = {(rank, stream): LineModel(limit=_LIMIT) for rank in range(ranks) for stream in (0, 1)}
        self._noise = {rank: Noise() for rank in range(ranks)}
        self._drops_noise = False
        self._drawn = ["", ""]  # the bar that is on the screen, per stream
        self._area = CellArea()

    def show(self, data: bytes, rank: int, stream: int) -> None:
        """Print the lines that are finished by these bytes, and the bar of rank 0."""
        done = self._models[rank, stream].feed(data)
        if self._drops_noise and stream == 1:
            done = self._noise[rank].without(done)
        if done or rank == 0:
            self._print(done, rank, stream)

    def drop_noise(self) -> None:
        """Leave out messages of torch about lost peers, from now on."""
        self._drops_noise = True

    def finish(self) -> None:
        """Print the remaining output."""
        for (rank, stream), model in self._models.items():
            self._print(model.end(), rank, stream)

    def _print(self, done: bytes, rank: int, stream: int) -> None:
        bars = [self._bar(each) for each in (0, 1)]
        if done:
            for each in (0, 1):  # both may be the same screen
                if not _is_cell(_stream(each)):
                    self._draw(each, "")
            lines = done.decode(errors="replace").removesuffix("\n").split("\n")
            _write(stream, "".join(f"{self._prefixes[rank]}{line}\n" for line in lines))
        for each in (0, 1):
            self._draw(each, bars[each])

    def _bar(self, stream: int) -> str:
        """Return the bar of rank 0, if it has one and it can be drawn."""
        model = self._models[0, stream]
        if not (model.bar and model.pending and shows_bars(_stream(stream))):
            return ""
        state = model.states()[-1].decode(errors="replace")
        return f"{self._prefixes[0]}{state}"[: _width(_stream(stream))]

    def _draw(self, stream: int, bar: str) -> None:
        before, self._drawn[stream] = self._drawn[stream], bar
        if bar == before:
            return
        if _is_cell(_stream(stream)):
            self._area.draw("\n".join(filter(None, self._drawn)))
            return
        rest = columns(before.encode()) - columns(bar.encode())
        _write(stream, f"\r{bar}{' ' * max(rest, 0)}" + ("" if bar else "\r"))


def _width(stream: TextIO) -> int:
    """Return how many columns a bar may have, so that it stays in one row."""
    try:
        return max(os.get_terminal_size(stream.fileno()).columns - 1, 20)
    except (OSError, AttributeError, ValueError):
        return _CELL_WIDTH


def _stream(number: int) -> TextIO:
    return sys.stderr if number else sys.stdout


def _write(number: int, text: str) -> None:
    stream = _stream(number)
    stream.write(text)
    stream.flush()
