"""The terminal itself: raw and on its other screen while we draw, and as it was whenever we do not.

with Terminal() as terminal:      # entered, and left however the block ends
    terminal.write(frame)         # what a slow one does not take at once follows when it can
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

# The other screen, no cursor, lines that do not wrap, and pasted text that can be told from keys.
_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[?2004h\x1b[0m\x1b[2J"
LEAVE = b"\x1b[?2026l\x1b[?2004l\x1b[?7h\x1b[0m\x1b[?25h\x1b[?1049l"
_PATIENCE = 1.0  # seconds for a terminal that takes nothing
_AWAY = 0.5  # seconds between two looks whether we are in front again


Attributes = list[int | list[bytes | int]]


class Terminal:
    def __init__(self, source: int = 0, target: int = 1) -> None:
        self.fd = source
        self._out, self._own = _once_more(target)
        self._as_it_was: Attributes | None = None
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
        return self._as_it_was is not None

    @property
    def in_front(self) -> bool:
        """What is typed is ours. In the background, to draw would be rude, and to change the terminal would stop us."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return True  # it does not control our session: nobody else's job either

    def size(self) -> tuple[int, int]:
        """Rows and columns; what does not tell is the usual one."""
        with contextlib.suppress(OSError, termios.error):
            rows, columns = termios.tcgetwinsize(self._out)
            if rows and columns:
                return rows, columns
        return 24, 80

    def enter(self) -> None:
        """Raises OSError: it is gone."""
        if self._as_it_was is None:
            try:
                attributes = termios.tcgetattr(self.fd)
                tty.setraw(self.fd, termios.TCSAFLUSH)  # what was typed before was for somebody else
            except termios.error as error:
                raise OSError(*error.args) from error
            self._as_it_was = attributes
            self._straight(_ENTER)

    def again(self) -> None:
        """Somebody has stopped us, and may have done to the terminal what he liked."""
        if self.entered and self.in_front:
            with contextlib.suppress(OSError, termios.error):
                tty.setraw(self.fd, termios.TCSANOW)
            self._straight(_ENTER)

    def leave(self) -> None:
        """Whatever else goes wrong."""
        if self._as_it_was is None:
            return
        attributes, self._as_it_was = self._as_it_was, None
        self._forget()
        with _allowed():
            self._straight(LEAVE)
            with contextlib.suppress(OSError, termios.error):
                # What was typed and not read was meant for us, and not for the shell; unless that has it already.
                when = termios.TCSAFLUSH if self.in_front else termios.TCSADRAIN
                termios.tcsetattr(self.fd, when, attributes)

    @property
    def busy(self) -> bool:
        """It has not taken yet what it was given: a newer frame is to wait."""
        return bool(self._rest)

    def write(self, data: bytes) -> None:
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
        except OSError:  # it is gone; whoever reads from it leaves
            self._rest = b""
        if self._loop is not None:
            if self._rest:
                self._loop.add_writer(self._out, self._flush)
            elif self._own:
                self._loop.remove_writer(self._out)

    def _forget(self) -> None:
        self._rest = b""
        if self._loop is not None and self._own:
            self._loop.remove_writer(self._out)

    def _straight(self, data: bytes) -> None:
        """All of it now, unless it is not taken."""
        ready = select.poll()
        ready.register(self._out, select.POLLOUT)
        with contextlib.suppress(OSError):  # it is gone
            while data and any(event & select.POLLOUT for _, event in ready.poll(int(_PATIENCE * 1000))):
                data = data[os.write(self._out, data) :]

    async def suspend(self) -> None:
        """Ctrl-Z: until the shell has us go on, and in front. With all that it calls this job, as the terminal would
        have done it; but not before that is as it was, for then it is the shell's."""
        self.leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)  # nothing happens where there is no shell that could have us go on
        await self.step_back()

    async def step_back(self) -> None:
        """Until it is ours again."""
        self.leave()
        while not self.in_front:
            await asyncio.sleep(_AWAY)
        self.enter()

    async def lend(self, words: Sequence[str], *, hint: str) -> int:
        """To another program, until it has ended; as a shell would, so that Ctrl-C is for that program alone."""
        self.leave()
        attributes = termios.tcgetattr(self.fd)
        without_ctrl_z = termios.tcgetattr(self.fd)
        without_ctrl_z[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(self.fd, termios.TCSADRAIN, without_ctrl_z)
        process = subprocess.Popen(words, stdin=self.fd, process_group=0)
        try:
            self._in_front(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)  # it may have read before it was in front
            code = await _ended(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            with contextlib.suppress(OSError):
                if os.tcgetpgrp(self.fd) == process.pid:  # else a shell has it: of a run that was killed
                    self._in_front(os.getpgrp())
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.fd, termios.TCSADRAIN, attributes)
        if code:  # what it has said about that would be hidden by our screen
            sys.stderr.write(hint)
            sys.stderr.flush()
            await self._typed()
        self.enter()
        return code

    def _in_front(self, group: int) -> None:
        with _allowed(), contextlib.suppress(OSError):
            os.tcsetpgrp(self.fd, group)

    async def _typed(self) -> None:
        """Until there is a line."""
        await _ready(self.fd)
        os.read(self.fd, 4096)


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """Change the terminal even from the background, where that would stop us."""
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


def _once_more(fd: int) -> tuple[int, bool]:
    """The same terminal, opened for us alone, so that it can be written to without waiting."""
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC), True
    return fd, False


def good_for_a_screen(term: str) -> bool:
    """Both ends are a terminal, and one that can move its cursor."""
    return os.isatty(0) and os.isatty(1) and term not in ("", "dumb", "unknown")
