"""A console under test: on a pseudo-terminal, whose screen a small emulator shows, or on pipes and files."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import re
import termios
import threading
import time
from collections.abc import Callable, Iterator

from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.filters import Std

PATIENCE = 20.0
CUT = re.compile(r"\x1b(\[[0-9;?]*)?$")  # the beginning of a control sequence


def until(condition: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what()}"
        time.sleep(0.002)


class Screen:
    """The content of a terminal after some bytes; rows that have scrolled off at the top are kept."""

    TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]")

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.lines: list[list[str]] = [[]]
        self.x = self.y = 0
        self.modes: dict[str, bool] = {}

    def feed(self, data: bytes) -> Screen:
        for token in self.TOKEN.finditer(data.decode()):
            if token[2]:
                self._control(token[1], token[2])
            elif token[0] == "\r":
                self.x = 0
            elif token[0] == "\n":
                self._down()
            else:
                self._put(token[0])
        return self

    def _down(self) -> None:
        self.x, self.y = 0, self.y + 1
        if self.y == len(self.lines):
            self.lines.append([])

    def _put(self, char: str) -> None:
        if self.x == self.width:
            self._down()
        row = self.lines[self.y]
        row.extend(" " * (self.x + 1 - len(row)))
        row[self.x] = char
        self.x += 1

    def _control(self, argument: str, final: str) -> None:
        number = int(argument) if argument.isdigit() else 0
        if final == "A":
            self.y = max(self.y - (number or 1), len(self.lines) - self.height, 0)
        elif final in "KJ" and number == 2:
            self.lines[self.y] = []
        elif final in "KJ":
            del self.lines[self.y][self.x :]
            if final == "J":
                del self.lines[self.y + 1 :]
        elif argument.startswith("?"):
            self.modes.update((mode, final == "h") for mode in argument[1:].split(";"))
        else:
            assert final == "m", f"{argument}{final} is for a screen that is not shared"

    @property
    def rows(self) -> list[str]:
        rows = ["".join(line).rstrip() for line in self.lines]
        while rows and not rows[-1]:
            rows.pop()
        return rows


class Terminal:
    """A pseudo-terminal with a reader."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.master, self.fd = pty.openpty()
        self.width, self.height = width, height
        termios.tcsetwinsize(self.fd, (height, width))
        self.data = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while more := os.read(self.master, 65536):
                self.data += more

    @property
    def screen(self) -> Screen:
        """Return the screen after the bytes read so far; an incomplete character or sequence at the end is omitted."""
        text = codecs.getincrementaldecoder("utf-8")().decode(self.data)
        return Screen(self.width, self.height).feed(CUT.sub("", text).encode())

    @property
    def rows(self) -> list[str]:
        return self.screen.rows

    def until(self, *rows: str) -> None:
        until(lambda: self.rows == list(rows), lambda: self.rows)

    def until_all(self, rows: list[str], *, last: int = 0) -> None:
        """Wait for these rows in any order, except for the last ones."""

        def all_there() -> bool:
            shown = self.rows  # read once: the console may be repainting
            ordered = shown[-last:] == rows[-last:] if last else True
            return ordered and sorted(filter(None, shown)) == sorted(filter(None, rows))

        until(all_there, lambda: self.rows)

    def close(self) -> None:
        os.close(self.fd)
        self._reader.join(PATIENCE)
        os.close(self.master)


class Worker:
    """Appends to a log, like the capture."""

    def __init__(self, console: Console, rank: int, stream: Std = Std.OUT, *, live: bool = False) -> None:
        self._log = os.memfd_create("log")
        self._feed: LogTail = console.attach(rank, stream, self._log, 0, live=live)

    def write(self, data: bytes | str) -> None:
        os.write(self._log, data.encode() if isinstance(data, str) else data)
        self._feed.grew(os.fstat(self._log).st_size)

    def end(self) -> None:
        self._feed.end()
        os.close(self._log)


@contextlib.contextmanager
def showing(world: int, terminal: Terminal, **options: object) -> Iterator[Console]:
    console = Console(world, out=terminal.fd, err=terminal.fd, colour=False, **options)  # type: ignore[arg-type]
    try:
        yield console
    finally:
        console.abandon()  # a failing test does not wait
        console.close()


class Captured:
    """Our stdout and stderr as files, which count as terminals only on request."""

    def __init__(self, world: int, **options: object) -> None:
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        self.console = Console(world, out=self._out, err=self._err, **options)  # type: ignore[arg-type]
        self._marks = 0

    def caught_up(self) -> None:
        """Wait until everything written so far has been shown: a message afterwards is on stderr, which is flushed
        last.
        """
        self._marks += 1
        self.console.say(f"mark {self._marks}.")
        until(lambda: f"mark {self._marks}.".encode() in self.err)

    @property
    def out(self) -> bytes:
        return os.pread(self._out, 1 << 26, 0)

    @property
    def err(self) -> bytes:
        return os.pread(self._err, 1 << 26, 0)

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *_: object) -> None:
        self.console.close()
        os.close(self._out)
        os.close(self._err)


def once(console: Console, rank: int, data: bytes | str, stream: Std = Std.OUT) -> None:
    """Run a worker that writes this, and ends."""
    worker = Worker(console, rank, stream)
    worker.write(data)
    worker.end()
