"""Withholds the last traceback of a worker from the console: the message about the failure says the same in fewer
lines.

    withheld = Withheld("…/attempt_0/1/traceback.txt")
    shown = withheld.feed(b"…whole lines…", now)    # without the traceback, which waits in `text`

A worker writes its last traceback, or the text that it passes to `sys.exit`, to a file before it prints it, so the text
is known exactly: nothing else is withheld. It waits until the failure was reported (`drop`), or turns out not to be
reported (`release`). After `DELAY` seconds it is always shown, unless a report is certain (`await_report`): the process
may continue without its main thread, or hang at its exit.

The error of argparse is withheld in the same way, and messages of torch and NCCL about a lost peer. They are recognized
by their form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from phalanx.launcher.output.console.line_model import plain
from phalanx.launcher.output.console.noise import Noise

DELAY = 10.0  # seconds that a traceback or a usage error may wait: a process needs seconds to exit on a busy machine
USAGE_DELAY = 2.0  # seconds that a usage message may wait for its error
_MOST_USAGE = 100  # lines of a usage message
_MOST_NOISE = 2000  # lines of torch and NCCL

_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix
_HEADS = ("Traceback (most recent call last):", '  File "', "  + Exception Group Traceback", "phalanx: ")
_USAGE = "usage: "
_STARTS = (*_HEADS, _USAGE, "[rank0]: ")  # of a line, also of a single rank behind torch's prefix
_NOISE = ("terminate called ", ".cpp:")
_ANY_HEAD = re.compile("|".join(map(re.escape, (*_HEADS, _USAGE, *_NOISE))).encode())
_USAGE_ERROR = re.compile(r"^[^\s:]+: error: ")


class Withheld:
    """The last traceback, or the usage error, in the output of one worker, and messages of torch about a lost peer."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: list[str] = []  # of the file
        self._version = (0, 0)  # of the file: its inode, and when it was written
        self._expected: list[str] = []  # lines of the traceback
        self._found = 0  # number of these lines found so far
        self._usage = False  # a usage message has begun
        self._held: list[bytes] = []
        self._due: float | None = None
        self._noise = Noise(aborts=True)
        self._noise_held: list[bytes] = []
        self._noise_due: float | None = None
        self._over = ""  # "dropped" or "released": what happens to a traceback from now on
        self._awaits_report = False  # the worker has failed: nothing becomes overdue

    @property
    def text(self) -> str:
        """Return the withheld text, as plain text."""
        return "\n".join(self._plain(line) for line in self._held)

    @property
    def due(self) -> float | None:
        """Return when `overdue` has something to show."""
        if self._awaits_report:
            return None
        return min((due for due in (self._due, self._noise_due) if due is not None), default=None)

    def feed(self, lines: bytes, now: float) -> bytes:
        """Return the lines to show now."""
        if self._over == "released":
            return lines
        if not self._inside and not _ANY_HEAD.search(lines) and not os.path.exists(self._path):
            return lines
        return b"".join(self._next(line, now) for line in lines.splitlines(keepends=True))

    def may_continue(self, started: bytes) -> bool:
        """Return whether an unfinished line may turn out to be one that must be withheld."""
        text = self._plain(started)
        if not started or self._inside:
            return bool(started)
        heads = (*_STARTS, *filter(None, self._printed()[:1]))
        return any(head.startswith(text) or text.startswith(head) for head in heads)

    def overdue(self, now: float) -> bytes:
        """Return output that has waited too long."""
        if self._awaits_report:
            return b""
        noise = self._release_noise() if self._noise_due is not None and now >= self._noise_due else b""
        return noise + (self._release(self._over) if self._due is not None and now >= self._due else b"")

    def await_report(self) -> None:
        """Wait for `drop` or `release`, however long a recovery takes: the failure of the worker is reported."""
        self._awaits_report = True

    def release(self) -> bytes:
        """Return the withheld output, to show it."""
        return self._release_noise() + self._release("released")

    def _release(self, over: str) -> bytes:
        lines = b"".join(self._held)
        self._held, self._due, self._over = [], None, over
        self._expected, self._found, self._usage = [], 0, False
        return lines

    def _release_noise(self) -> bytes:
        lines = b"".join(self._noise_held)
        self._noise_held, self._noise_due = [], None
        return lines

    def drop(self, matches: Callable[[str], bool] | None = None) -> None:
        """Drop the withheld output, now and later: it was reported.

        `matches`: the traceback only if this is true for its text.
        """
        self._release_noise()
        if matches is None:
            self._over = "dropped"
            self._held, self._due = [], None
        elif self._held and matches(self.text):
            self._held, self._due = [], None

    @property
    def _inside(self) -> bool:
        return self._usage or self._noise.inside or 0 < self._found < len(self._expected)

    def _next(self, line: bytes, now: float) -> bytes:
        text = self._plain(line)
        if self._usage:
            return self._next_of_usage(line, text, now)
        if 0 < self._found < len(self._expected):
            if text != self._expected[self._found]:
                return self._release(self._over) + line
            self._keep(line, now)
        elif self._noise.drops(line):
            return self._keep_noise(line, now)
        elif self._held and self._complete:
            return line
        elif text.startswith(_USAGE):
            self._usage, self._held, self._due = True, [line], now + USAGE_DELAY
        elif self._starts(text):
            self._keep(line, now)
        else:
            return line
        return b""

    @property
    def _complete(self) -> bool:
        return bool(self._expected) and self._found == len(self._expected)

    def _keep(self, line: bytes, now: float) -> None:
        self._found += 1
        self._held.append(line)
        self._due = now + DELAY
        if self._over == "dropped" and self._complete:
            self._held, self._due = [], None

    def _keep_noise(self, line: bytes, now: float) -> bytes:
        """Withhold a line. Return what to show instead: all of it, if it is too much."""
        if self._over != "dropped":
            self._noise_held.append(line)
            self._noise_due = now + DELAY
        return self._release_noise() if len(self._noise_held) > _MOST_NOISE else b""

    def _next_of_usage(self, line: bytes, text: str, now: float) -> bytes:
        self._held.append(line)
        if _USAGE_ERROR.match(text):
            self._usage, self._due = False, now + DELAY  # complete
            if self._over == "dropped":
                self._held, self._due = [], None
        elif (text and not text.startswith(" ")) or len(self._held) > _MOST_USAGE:
            return self._release(self._over)
        return b""

    def _starts(self, text: str) -> bool:
        """Return whether the traceback starts with this line."""
        expected = self._printed()
        if not expected or not text or expected[0] != text:
            return False
        self._expected, self._found = expected, 0
        return True

    def _printed(self) -> list[str]:
        """Return the lines that the worker prints about its failure. Empty: none yet."""
        try:
            found = os.stat(self._path)
            version = found.st_ino, found.st_mtime_ns  # two files within one tick of the kernel's clock differ, too
            if version != self._version:
                with open(self._path, encoding="utf-8", errors="replace") as file:
                    self._lines = [line.rstrip() for line in file.read().removesuffix("\n").split("\n")]
                self._version = version
        except OSError:
            return []
        return self._lines

    @staticmethod
    def _plain(line: bytes) -> str:
        return _RANK.sub("", plain(line).rstrip("\r\n")).rstrip()
