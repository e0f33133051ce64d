"""One captured stream of a worker: its pipe or pseudo-terminal, its log, and the readers of the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import termios
from dataclasses import dataclass, field

from phalanx.launcher.output.console.line_model import LineModel, plain
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.filters import Duplicate, Std
from phalanx.launcher.output.log_forwarder import ForwardedStream

TAIL_SIZE = 1 << 17
_MOST_REPEATED = 1 << 20
NAMES: tuple[tuple[Std, str], ...] = ((Std.OUT, "stdout"), (Std.ERR, "stderr"))


@dataclass(eq=False)
class CapturedStream:
    """One stream of a worker, or both if they are shown in one place."""

    rank: int
    std: Std
    path: str
    source: int  # our end of the pipe
    target: int | None  # the worker's end, until it is handed over
    pty: bool
    log: int | None  # None: it could not be opened
    start: int  # of this worker's part of the log
    size: int  # of the log
    ended: asyncio.Future[None]
    followers: list[LogTail | ForwardedStream] = field(default_factory=list)  # readers of the log
    duplicate: Duplicate | None = None
    unkept: bytes = b""  # the last bytes that could not be written to the log
    repeated: bytes = b""  # output before the worker started over, which it writes again
    held: bytes = b""  # the part of `repeated` that it has written since its last whole line

    def start_over(self) -> None:
        """Drop output that the worker repeats, because it starts over in the same process."""
        if self.log is not None and self.size - self.start <= _MOST_REPEATED:
            self.repeated = os.pread(self.log, self.size - self.start, self.start)

    def not_repeated(self, data: bytes) -> bytes:
        """Return the data from the first line that differs. Withhold data that may still be the same line."""
        data = self.held + data
        pairs = enumerate(zip(data, self.repeated, strict=False))
        same = next((place for place, (new, old) in pairs if new != old), min(len(data), len(self.repeated)))
        line = self.repeated.rfind(b"\n", 0, same) + 1
        if same == len(self.repeated):
            self.repeated = self.held = b""
            return data[same:]
        if same < len(data):
            self.repeated = self.held = b""
            return data[line:]
        self.repeated, self.held = self.repeated[line:], data[line:]
        return b""

    def last_lines(self, lines: int) -> list[str]:
        """Return the last lines as plain text, progress bars in their last state."""
        data = self._last_bytes()
        if len(data) == TAIL_SIZE:  # probably starts within a line
            data = data[data.find(b"\n") + 1 :]
        model = LineModel()
        text = model.feed(data + self.unkept) + model.end()
        shown = [plain(line).rstrip() for line in text.split(b"\n")]
        while shown and not shown[-1]:
            shown.pop()
        return shown[-lines:] if lines > 0 else []

    def _last_bytes(self) -> bytes:
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(max(self.size - TAIL_SIZE, 0))
            return file.read(min(self.size, TAIL_SIZE))
        return b""


def open_log(path: str) -> int:
    """Open a log for appending, and for the console to read."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def make_raw(terminal: int) -> None:
    """Make the terminal pass bytes unchanged: no carriage returns, no echo."""
    attributes = termios.tcgetattr(terminal)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(terminal, termios.TCSANOW, attributes)


def resize(terminal: int, window: tuple[int, int]) -> None:
    """Set the size of a terminal, if it still has one."""
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(terminal, window)
