"""One stream of a rank on the console."""

from __future__ import annotations

import re

from phalanx.launcher.output.console.line_model import LineModel
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.sink import Sink

_TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?(?!\[)", re.MULTILINE)  # of a traceback: the line has a prefix already
_MODES_SHARED = (b"25", b"2004")  # modes that rank 0 may change when there are other ranks


class ShownStream:
    """Splits the output of a rank into finished lines and unfinished rows: a prompt, one or more bars.

    Without a line model, bytes pass unchanged. The unfinished rows of a live stream are painted. Of other streams,
    an unfinished line is shown after `quiet` seconds, and the state of a bar every `bar_interval` seconds.
    """

    def __init__(self, sink: Sink, lines: LineModel | None, tail: LogTail, *, live: bool) -> None:
        self.sink = sink
        self.lines = lines
        self.tail = tail
        self.live = live and lines is not None
        self.rank = 0
        self.prefix = b""
        self.showing = False  # an unfinished line is on the screen
        self._last_data = 0.0
        self._bar_due: float | None = None  # when to show the state of a bar without a terminal
        self._bar_shown = b""
        self._started = b""  # a line that may begin a traceback to withhold, without a line model

    # -- output

    def unwithheld(self, data: bytes, now: float, *, last: bool = False) -> bytes:
        """Return the bytes to show of a stream without a line model: all, unless its traceback is withheld."""
        withheld = self.tail.withheld
        if withheld is None:
            return data
        lines, newline, rest = (self._started + data).rpartition(b"\n")
        shown = withheld.feed(lines + newline, now)
        self._started = rest if not last and withheld.may_continue(rest) else b""
        return shown if self._started else shown + rest

    def feed(self, data: bytes, now: float, bar_interval: float) -> bytes:
        """Process output, and return the finished lines."""
        if self.lines is None:
            return b""
        self._last_data = now
        done = self.lines.feed(data)
        if done and self._bar_shown:
            done = done.removeprefix(self._bar_shown)
            self._bar_shown = b""
        if self.sink.terminal or not (self.lines.bar and self.lines.pending):
            self._bar_due = None
        elif self._bar_due is None:
            self._bar_due = now + bar_interval
        return done

    def take_over(self, *, reclaim: bool) -> None:
        """Apply changes by the output to the sink: modes of the terminal and, if `reclaim`, finished rows."""
        if self.lines is None:
            return
        if self.live:
            for mode in self.lines.modes:
                if mode[3:-1] in _MODES_SHARED:
                    self.sink.mode(mode)
            if reclaim:
                self.sink.reclaim(self.row(line) for line in self.lines.reclaimed)
        self.lines.modes.clear()
        self.lines.reclaimed.clear()

    def end(self) -> bytes:
        """Return the rest as finished lines."""
        if self.lines is None:
            return b""
        done = self.lines.end()
        return done.removeprefix(self._bar_shown) if self._bar_shown else done

    # -- time

    def due(self, quiet: float) -> float | None:
        """Return when to call `overdue` next."""
        times = [] if self._bar_due is None else [self._bar_due]
        if self.lines is not None and self.lines.rest:
            times.append(self._last_data + self.lines.rest * quiet)
        return min(times, default=None)

    def overdue(self, now: float, quiet: float, bar_interval: float) -> list[bytes]:
        """Return unfinished lines to show now: nothing follows, or the state of a bar is due."""
        if self.lines is None:
            return []
        found = []
        if self.lines.rest and not self.tail.queued and now - self._last_data >= self.lines.rest * quiet:
            found.append(self.lines.settle())
        if self._bar_due is not None and now >= self._bar_due:
            self._bar_due = now + bar_interval
            bar_shown = b"".join(state + b"\n" for state in self.lines.states() if state)
            if bar_shown != self._bar_shown:
                self._bar_shown = bar_shown
                found.append(bar_shown)
        return found

    # -- unfinished rows of a live stream

    def painting_due(self, quiet: float) -> float | None:
        """Return when unfinished rows must be painted, if they are not yet."""
        if self.lines is not None and self.lines.pending and not self.showing:
            return self._last_data + quiet
        return None

    def area(self, now: float, quiet: float) -> list[bytes]:
        """Return the rows to paint."""
        if self.lines is None:
            return []
        silent = not self.tail.queued and now - self._last_data >= quiet
        self.showing = self.lines.pending and (self.lines.bar or self.showing or silent)
        return [self.row(state) if state else b"" for state in self.lines.states()] if self.showing else []

    @property
    def prompts(self) -> bool:
        """Return whether a prompt is on the screen."""
        return self.showing and self.lines is not None and not self.lines.bar

    def leave_prompt(self) -> None:
        """Finish a prompt: the rank no longer waits there."""
        if self.lines is not None and self.sink.let_go(self.row(self.lines.states()[0])):
            self.lines.let_go()
            self.showing = False

    def seal(self) -> None:
        """Make finished rows final, because another writer has printed below them."""
        if self.lines is not None:
            self.lines.past.clear()

    # -- text

    def row(self, line: bytes) -> bytes:
        """Return a line with its prefix."""
        return self.rendered(line + b"\n")[:-1]

    def rendered(self, lines: bytes) -> bytes:
        """Return whole lines with their prefix."""
        if self.sink.terminal and b"\x1b" in lines:
            lines = b"\n".join(map(_reset, lines.split(b"\n")))
        if not self.prefix:
            return lines
        if b"[rank" in lines:
            lines = _TORCH_PREFIX.sub(b"", lines)
        return self.prefix + lines[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"


def _reset(line: bytes) -> bytes:
    """End colours with the line: the next line may belong to another rank."""
    return line + b"\x1b[0m" if b"\x1b[" in line and not line.endswith((b"\x1b[0m", b"\x1b[m")) else line
