"""The terminal: raw and on its alternate screen while we draw, restored whenever we do not.

with Terminal() as terminal:      # restored however the block ends
    terminal.write(frame)         # what a slow terminal does not accept at once is written later
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator, Sequence

# Alternate screen, no cursor, no line wrapping, bracketed paste.
_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[?2004h\x1b[0m\x1b[2J"
LEAVE = b"\x1b[?2026l\x1b[?2004l\x1b[?7h\x1b[0m\x1b[?25h\x1b[?1049l"
_WRITE_TIMEOUT = 1.0  # seconds
_AWAY = 0.5  # seconds between two checks whether we are in the foreground


Attributes = list[int | list[bytes | int]]


class Terminal:
    """The terminal of this process."""

    def __init__(self, source: int = 0, target: int = 1) -> None:
        self.fd = source
        self._out, self._own = _reopened(target)
        self._saved_attributes: Attributes | None = None
        self._rest = b""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Terminal:
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        if self._own:
            os.close(self._out)

    @property
    def entered(self) -> bool:
        """Whether it is in raw mode on the alternate screen."""
        return self._saved_attributes is not None

    @property
    def in_front(self) -> bool:
        """Whether this job is in the foreground.

        A background job must not draw, and changing the terminal would stop it.
        """
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return True  # not our controlling terminal: there is no job control

    def size(self) -> tuple[int, int]:
        """Return rows and columns; 24 and 80 if they are unknown."""
        with contextlib.suppress(OSError, termios.error):
            rows, columns = termios.tcgetwinsize(self._out)
            if rows and columns:
                return rows, columns
        return 24, 80

    def enter(self) -> None:
        """Switch to raw mode and the alternate screen. Raises OSError if the terminal is gone."""
        if self._saved_attributes is None:
            try:
                attributes = termios.tcgetattr(self.fd)
                tty.setraw(self.fd, termios.TCSAFLUSH)  # drop earlier input: it was not meant for us
            except termios.error as error:
                raise OSError(*error.args) from error
            self._saved_attributes = attributes
            self._write_now(_ENTER)

    def reenter(self) -> None:
        """Set up the terminal once more, after this process was stopped and continued."""
        if self.entered and self.in_front:
            with contextlib.suppress(OSError, termios.error):
                tty.setraw(self.fd, termios.TCSANOW)
            self._write_now(_ENTER)

    def leave(self) -> None:
        """Restore the terminal."""
        if self._saved_attributes is None:
            return
        attributes, self._saved_attributes = self._saved_attributes, None
        self._drop_pending()
        with _allowed():
            self._write_now(LEAVE)
            with contextlib.suppress(OSError, termios.error):
                # Unread input was meant for us, not for the shell, unless the shell is already in the foreground.
                when = termios.TCSAFLUSH if self.in_front else termios.TCSADRAIN
                termios.tcsetattr(self.fd, when, attributes)

    @property
    def busy(self) -> bool:
        """Whether the last frame is still being written: then skip the next one."""
        return bool(self._rest)

    def write(self, data: bytes) -> None:
        """Write without blocking."""
        if not self.entered:
            return
        self._rest += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._out, self._rest[:65536]) :]
        except BlockingIOError:
            pass
        except OSError:  # the terminal is closed; the reader notices
            self._rest = b""
        if self._loop is not None:
            if self._rest:
                self._loop.add_writer(self._out, self._flush)
            elif self._own:
                self._loop.remove_writer(self._out)

    def _drop_pending(self) -> None:
        self._rest = b""
        if self._loop is not None and self._own:
            self._loop.remove_writer(self._out)

    def _write_now(self, data: bytes) -> None:
        """Write all of it now, unless the terminal does not accept it."""
        ready = select.poll()
        ready.register(self._out, select.POLLOUT)
        with contextlib.suppress(OSError):  # the terminal is closed
            while data and any(event & select.POLLOUT for _, event in ready.poll(int(_WRITE_TIMEOUT * 1000))):
                data = data[os.write(self._out, data) :]

    async def suspend(self) -> None:
        """Handle Ctrl-Z: restore the terminal, and stop the job until the shell continues it."""
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)  # ignored if there is no shell that could continue us
        await self.step_back()

    async def step_back(self) -> None:
        """Restore the terminal and wait until this job is in the foreground again."""
        self.leave()
        while not self.in_front:
            await asyncio.sleep(_AWAY)
        self.enter()

    async def lend(self, words: Sequence[str], *, hint: str) -> int:
        """Run another program in the foreground, as a shell does: Ctrl-C goes to that program only."""
        self.leave()
        attributes = termios.tcgetattr(self.fd)
        without_ctrl_z = termios.tcgetattr(self.fd)
        without_ctrl_z[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(self.fd, termios.TCSADRAIN, without_ctrl_z)
        process = subprocess.Popen(words, stdin=self.fd, process_group=0)
        try:
            self._in_front(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)  # it may have been stopped because it read too early
            code = await _ended(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            with contextlib.suppress(OSError):
                if os.tcgetpgrp(self.fd) == process.pid:  # otherwise a shell has taken the terminal
                    self._in_front(os.getpgrp())
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.fd, termios.TCSADRAIN, attributes)
        if code:  # keep its error message visible
            sys.stderr.write(hint)
            sys.stderr.flush()
            await self._typed()
        self.enter()
        return code

    def _in_front(self, group: int) -> None:
        with _allowed(), contextlib.suppress(OSError):
            os.tcsetpgrp(self.fd, group)

    async def _typed(self) -> None:
        """Wait for a line."""
        await _ready(self.fd)
        os.read(self.fd, 4096)


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """Allow changes of the terminal from the background, where they would stop us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _ended(process: subprocess.Popen[bytes]) -> int:
    handle = os.pidfd_open(process.pid)
    try:
        await _ready(handle)
    finally:
        os.close(handle)
    return process.wait()


async def _ready(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _reopened(fd: int) -> tuple[int, bool]:
    """Open the same terminal again, so that non-blocking mode affects only us."""
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC), True
    return fd, False


def supports_screen(term: str) -> bool:
    """Return whether stdin and stdout are a terminal that can move its cursor."""
    return os.isatty(0) and os.isatty(1) and term not in ("", "dumb", "unknown")
