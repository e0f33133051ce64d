"""A command that runs beside the test: its output is read all the time, and it never outlives the test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import selectors
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tests.kit import proc

Matches = list[re.Match[str]]
HELD = 2.0 * proc.SLOWEST  # seconds that processes which are just ending may hold the output of a command open

_live: list[Handle] = []


def mark() -> int:
    return len(_live)


def end_since(started: int) -> None:
    """End every command started since that mark."""
    while len(_live) > started:
        _live.pop().end()


class Handle:
    """
    job = start("run", "-g", "2", "sleepy.py")
    job.wait_for("ready", count=2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    """

    def __init__(self, process: subprocess.Popen[bytes], sources: Mapping[int, str]) -> None:
        self.process = process
        self.started = time.monotonic()
        self.ended: float | None = None
        self._text = {"out": bytearray(), "err": bytearray()}
        self._both = bytearray()
        self._open = dict(sources)  # file descriptor -> name of the stream
        self._news = threading.Condition()
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        # Read without a pause: a full pipe would block the command.
        self._reader = threading.Thread(target=self._read, name=f"output of {process.pid}", daemon=True)
        self._reader.start()
        _live.append(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self.bytes("out").decode(errors="surrogateescape")

    @property
    def err(self) -> str:
        return self.bytes("err").decode(errors="surrogateescape")

    @property
    def both(self) -> str:
        """Both streams in the order in which they were read."""
        with self._news:
            return self._both.decode(errors="surrogateescape")

    def bytes(self, stream: str) -> bytes:
        with self._news:
            return bytes(self._text[stream])

    def wait_for(self, text: str | re.Pattern[str], count: int = 1, timeout: float = 60) -> Matches:
        """Wait until the text was written `count` times; return the matches. Fails at once if that cannot happen."""
        pattern = re.compile(re.escape(text)) if isinstance(text, str) else text
        limit = timeout * proc.SLOWEST
        found: Matches = []

        def settled() -> bool:
            found[:] = pattern.finditer(self._both.decode(errors="surrogateescape"))
            return len(found) >= count or not self._open

        with self._news:
            in_time = self._news.wait_for(settled, limit)
        if len(found) < count:
            why = "the command ended" if in_time else f"{limit:g} s passed"
            self._fail(f"{pattern.pattern!r} was written {len(found)} times, not {count}, when {why}")
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        """Wait for the end. Return the exit code, or minus the number of the signal that killed it."""
        limit = timeout * proc.SLOWEST
        if self.process.poll() is None:
            # Not Popen's own wait, which polls only every 50 ms with a timeout.
            ending = self._ending()
            ended, _, _ = select.select([ending], [], [], limit)
            os.close(ending)
            if not ended:
                self._fail(f"did not end in {limit:g} s")
        if self.ended is None:
            self.ended = time.monotonic()
        self._drain(1)
        return self.process.wait()

    def _ending(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return os.pidfd_open(self.pid)

    @property
    def open_streams(self) -> list[int]:
        return list(self._open)

    def drained(self, timeout: float | None = None) -> bool:
        """Return whether both streams are at their end. If not, a process that outlives the command keeps them open."""
        self._drain(HELD if timeout is None else timeout)
        return not self._open

    def end(self) -> None:
        """Kill the command and all its descendants, and close its output."""
        if self in _live:
            _live.remove(self)
        # Once it is reaped, its pid may belong to another process. Its leftovers are then our children, and found as
        # leaks.
        family = [self.pid, *proc.descendants(self.pid)] if self.process.poll() is None else []
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._drain(0.2)
        self._stop_reading()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _stop_reading(self) -> None:
        if self._stop_write >= 0:
            os.close(self._stop_write)
            self._stop_write = -1
            self._reader.join()

    def _drain(self, timeout: float) -> None:
        """Wait for the end of both streams; if they stay open for longer, until all that was written is read."""
        with self._news:
            self._news.wait_for(lambda: not self._open, timeout)
            self._news.wait_for(lambda: not self._unread, 10)

    @property
    def _unread(self) -> bool:
        return bool(self._open) and bool(select.select([*self._open], [], [], 0)[0])

    def _fail(self, what: str) -> NoReturn:
        words = " ".join(map(str, self.process.args)) if isinstance(self.process.args, Sequence) else ""
        raise AssertionError(f"{what}: {words}\n--- output\n{self.both}")

    def _read(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._stop_read, selectors.EVENT_READ)
            for fd in self._open:
                ready.register(fd, selectors.EVENT_READ)
            while self._open:
                fds = [key.fd for key, _ in ready.select()]
                if self._stop_read in fds:
                    break
                for fd in fds:
                    self._take(ready, fd)
        with self._news:
            for fd in [*self._open]:
                self._close(fd)
            self._news.notify_all()
        os.close(self._stop_read)

    def _take(self, ready: selectors.BaseSelector, fd: int) -> None:
        with self._news:  # also while reading, which does not block: `_drain` finds it there or here
            try:
                data = os.read(fd, 1 << 16)
            except OSError:  # a terminal reports that no process has it open any more
                data = b""
            if data:
                self._text[self._open[fd]] += data
                self._both += data
            else:
                ready.unregister(fd)
                self._close(fd)
            self._news.notify_all()

    def _close(self, fd: int) -> None:
        del self._open[fd]
        os.close(fd)


class Terminal(Handle):
    """A command in its own terminal, which it controls: supports keys and resizing."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self._keys = os.dup(screen)
        super().__init__(process, {screen: "out"})

    def send(self, keys: bytes) -> None:
        """Type keys: send(b"\\x03") is Ctrl-C, b"\\x1c" Ctrl-\\, b"\\x1a" Ctrl-Z."""
        os.write(self._keys, keys)

    def resize(self, rows: int, columns: int) -> None:
        resize(self._keys, rows, columns)

    def hang_up(self) -> None:
        """Close the window."""
        self._stop_reading()
        if self._keys >= 0:
            os.close(self._keys)
            self._keys = -1

    def end(self) -> None:
        super().end()
        self.hang_up()


def resize(screen: int, rows: int, columns: int) -> None:
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def take_terminal() -> None:
    """Make the terminal on standard input the controlling terminal of this session. Runs in the child."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
