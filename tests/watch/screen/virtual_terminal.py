"""The screen of a terminal: the output of a command in a terminal emulator."""

from __future__ import annotations

import re
import termios
import time
from collections.abc import Callable

import pyte

from tests.kit.cli import Terminal
from tests.kit.proc import SLOWEST

LEFT = b"\x1b[?1049l"


class VirtualTerminal:
    """
    term = VirtualTerminal(terminal("watch"), 24, 80)
    term.until("running")
    term.type("f")
    """

    def __init__(self, job: Terminal, rows: int = 24, columns: int = 80) -> None:
        self.job = job
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._read = 0

    def resize(self, rows: int, columns: int) -> None:
        self.look()
        self._screen.resize(rows, columns)
        self.job.resize(rows, columns)

    def type(self, keys: str) -> None:
        self.job.send(keys.encode())

    def look(self) -> list[str]:
        data = self.job.bytes("out")
        self._stream.feed(data[self._read :])
        self._read = len(data)
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.look())

    @property
    def cursor(self) -> bool:
        """Whether the cursor is visible."""
        self.look()
        return not self._screen.cursor.hidden

    @property
    def aside(self) -> bool:
        """Whether the alternate screen is active."""
        data = self.job.bytes("out")
        return data.rfind(b"\x1b[?1049h") > data.rfind(LEFT)

    @property
    def afterwards(self) -> str:
        """The output after the alternate screen was left."""
        return self.job.bytes("out").rpartition(LEFT)[2].decode()

    def colours(self, row: int) -> set[str]:
        self.look()
        return {self._screen.buffer[row][column].fg for column in range(self._screen.columns)}

    def until(self, what: str | Callable[[str], bool], timeout: float = 60) -> str:
        """Wait until a pattern is visible, or a condition is true."""
        seen = what if callable(what) else lambda text: re.search(what, text) is not None
        start = time.monotonic()
        while not seen(text := self.text):
            if time.monotonic() - start > timeout * SLOWEST or self.job.process.poll() is not None:
                raise AssertionError(f"{what!r} is not to be seen:\n{text}\n--- {self.job.process.poll()}")
            time.sleep(0.02)
        return text


def attributes(term: VirtualTerminal) -> list[object]:
    """Return the attributes of the terminal."""
    return termios.tcgetattr(term.job._keys)
