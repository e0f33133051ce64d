"""The output of the console: a file, a pipe, or a terminal with a repainted area at the bottom."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import termios
from collections.abc import Iterable

from phalanx.launcher.output.console.line_model import CUT, columns

REPAINT = 0.03  # seconds between two states of a bar

_MODE = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")
_MODES_ON = (b"7", b"25")  # of a terminal at rest: line wrap and cursor

Attributes = tuple[int, list[int | list[bytes | int]]]  # a descriptor and its termios attributes


class Sink:
    """One output of the console."""

    def __init__(self, fd: int, *, terminal: bool | None) -> None:
        self.fd = fd
        self.dead = False
        self.abandoned = False
        self.waiting = 0  # bytes that are not written yet
        self.unwritten = 0  # bytes that a full disk did not accept
        self.repaint_at = 0.0
        self.late = False  # the area must be repainted
        try:
            os.fstat(fd)
            self.terminal = os.isatty(fd) if terminal is None else terminal
        except OSError:  # the process that started us closed it
            self.dead, self.terminal = True, False
        self._lines: list[bytes] = []
        self._painted = b""
        self._modes: dict[bytes, bool] = {}
        self._cut = b""
        self._escaped = False
        self._fresh = True  # the cursor is at the start of a line

    def size(self) -> tuple[int, int]:
        """Return rows and columns, or zeros if it is not a terminal."""
        with contextlib.suppress(OSError, termios.error):
            return termios.tcgetwinsize(self.fd)
        return 0, 0

    def put(self, lines: bytes) -> None:
        """Add whole lines to the next flush."""
        if lines:
            self._lines.append(lines)
            self.waiting += len(lines)

    def reclaim(self, lines: Iterable[bytes]) -> None:
        """Make lines above the area part of it."""
        self._painted = b"".join(line + b"\n" for line in lines) + self._painted

    def flush(self, rows: list[bytes], now: float) -> None:
        """Write the added lines and, below them, the area."""
        area = b"\n".join(self._fitting(rows))
        new = b"".join(self._lines) + area
        self.late = False
        if not self._lines and area == self._painted:
            return
        grown = new.startswith(self._painted)
        if not grown and not self._lines and now < self.repaint_at:
            self.late = True
            return
        self._lines.clear()
        self.waiting = 0
        if grown:  # append only: text that the user typed after a prompt stays
            self._write(new[len(self._painted) :])
        else:
            self._write(self._erasure() + new)
        self._painted = area
        self._fresh = not area
        self.repaint_at = now + REPAINT

    def let_go(self, row: bytes) -> bool:
        """If the area is this row only, leave it on the screen and continue below. Return whether it was."""
        if self._painted != row:
            return False
        # The cursor is on the next line only if the user has answered the prompt, which we cannot know. Almost a line
        # of blanks wraps to the next line unless the cursor is in the first column.
        self._write(b"\x1b[K%b\r\x1b[K" % (b" " * ((self.size()[1] or 80) - 1)))
        self._painted, self._fresh = b"", True
        return True

    def straight(self, data: bytes) -> None:
        """Write bytes unchanged."""
        if data:
            self._watch_modes(data)
            self._write(data)
            self._fresh = data.endswith(b"\n")

    def interject(self, lines: bytes) -> None:
        """Write whole lines between bytes that were written by `straight`."""
        self.put(lines if self._fresh else b"\n" + lines)
        self.flush([], 0.0)

    def entered(self) -> None:
        """Record that the user typed a line, so the cursor is at the start of the next."""
        self._fresh = True

    def mode(self, sequence: bytes) -> None:
        """Change a mode of the terminal."""
        self._watch_modes(sequence)
        self._write(sequence)

    def restore(self) -> None:
        """Restore cursor, screen, keys and colour of a terminal."""
        if not self.terminal:
            return
        changed = [(mode, on) for mode, on in self._modes.items() if on != (mode in _MODES_ON)]
        self._modes.clear()
        self._write(b"".join(b"\x1b[?%b%b" % (mode, b"l" if on else b"h") for mode, on in changed))
        self._write(b"\x1b[0m" * self._escaped)
        self._escaped = False

    def leave(self) -> None:
        """Restore the terminal at the end, without blocking if it was abandoned."""
        if self.abandoned:  # it may be blocked, by Ctrl-S or a stuck connection
            ready = select.poll()
            ready.register(self.fd, select.POLLOUT)
            self.dead = self.dead or not any(event & select.POLLOUT for _, event in ready.poll(0))
            self.abandoned = False
        if self.terminal:
            self.restore()
            self._write(b"\n" * (not self._fresh))
            self._fresh, self._painted = True, b""

    def _fitting(self, rows: list[bytes]) -> list[bytes]:
        """Return the lowest rows that fit on the screen: rows above it cannot be repainted."""
        left = self._height() - 1 if rows else 0
        for at in range(len(rows) - 1, -1, -1):
            left -= self._height_of(rows[at])
            if left < 0:
                return rows[at + 1 :] or rows[-1:]
        return rows

    def _height(self) -> int:
        return self.size()[0] or 24

    def _height_of(self, row: bytes) -> int:
        width = self.size()[1] or 80
        return max(-(-columns(row) // width), 1)

    def _erasure(self) -> bytes:
        up = sum(self._height_of(row) for row in self._painted.split(b"\n")) - 1
        return b"\r" + (b"\x1b[%dA" % up if up else b"") + b"\x1b[J"

    def _watch_modes(self, data: bytes) -> None:
        if b"\x1b" not in data and not self._cut:
            return
        self._escaped = True
        data = self._cut + data
        for found in _MODE.finditer(data):
            self._modes.update((mode, found[2] == b"h") for mode in found[1].split(b";"))
        escape = data.rfind(b"\x1b", max(len(data) - 40, 0))
        self._cut = data[escape:] if escape >= 0 and CUT.fullmatch(data, escape) else b""

    def _write(self, data: bytes) -> None:
        self._escaped = self._escaped or (self.terminal and b"\x1b" in data)
        left = memoryview(data)
        while left and not self.dead and not self.abandoned:
            try:
                left = left[os.write(self.fd, left[:65536]) :]
            except BlockingIOError:  # another process has made it non-blocking
                ready = select.poll()
                ready.register(self.fd, select.POLLOUT)
                ready.poll(100)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.unwritten += len(left)
                    return
                self.dead = True  # the reader (`| head`) or the terminal is closed


def attributes(descriptors: Iterable[int]) -> Attributes | None:
    """Return the attributes of the first descriptor that is a terminal."""
    for fd in descriptors:
        with contextlib.suppress(OSError, termios.error):
            return fd, termios.tcgetattr(fd)
    return None


def restore(saved: Attributes | None) -> None:
    """Restore the attributes of a terminal: a worker that read from it may have changed them and died."""
    if saved is None:
        return
    fd, attributes = saved
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(fd) != os.getpgrp():  # in the background it would stop us; the shell restores them
            return
    with contextlib.suppress(OSError, termios.error):
        if termios.tcgetattr(fd) != attributes:
            termios.tcsetattr(fd, termios.TCSANOW, attributes)
