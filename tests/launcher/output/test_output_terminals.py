"""Output of real processes through real pseudo-terminals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pty
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.launcher.output.filters import Std
from tests.launcher.output.captured_run import PATIENCE, SPEED, Run, running, written


@pytest.fixture
def terminal() -> Iterator[int]:
    """Our own terminal, with a reader."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (30, 90))

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(master, 65536):
                pass

    thread = threading.Thread(target=read)
    thread.start()
    yield slave
    os.close(slave)
    thread.join(PATIENCE)
    os.close(master)


ABOUT = """
import os, sys, termios
print(os.isatty(1), os.isatty(2), *os.get_terminal_size(1))
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print(error.errno)
print(bool(termios.tcgetattr(1)[1] & termios.OPOST) if os.isatty(1) else "")
"""


def test_rank_0_has_a_terminal_where_ours_is_one(tmp_path: Path, terminal: int) -> None:
    async def body(run: Run) -> None:  # our stderr is not a terminal
        assert run.start(0, ABOUT, terminal=True).wait() == 0
        assert await run.output.drained(PATIENCE) == []
        # Four columns are the prefix's. The worker's session has no terminal that could send it signals.
        assert run.log(0).decode() == f"True False 86 30\n{errno.ENXIO}\nFalse\n"

    running(tmp_path, 2, body, out=terminal)


@pytest.mark.parametrize("show", [Std.NONE, Std.ERR])
def test_what_is_not_shown_needs_no_terminal(tmp_path: Path, terminal: int, show: Std) -> None:
    async def body(run: Run) -> None:
        run.start(0, "import os; print(os.isatty(1))", show=show, terminal=True).wait()
        assert await run.output.drained(PATIENCE) == []
        assert run.log(0) == b"False\n"

    running(tmp_path, 2, body, out=terminal)


def test_workers_have_no_terminal_if_the_agent_has_none(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        run.start(0, "import os; print(os.isatty(1), os.isatty(2))", terminal=True).wait()
        assert await run.output.drained(PATIENCE) == []
        assert run.log(0) == b"False False\n"
        assert run.output.resized() == []

    running(tmp_path, 2, body)


def test_a_terminal_loses_nothing_either(tmp_path: Path, terminal: int) -> None:
    async def body(run: Run) -> None:
        process = run.start(0, SPEED, 0, 3_000_000, terminal=True)
        assert await run.output.drained(PATIENCE) == []
        assert process.wait() == 0
        assert run.log(0) == written(0, 3_000_000)

    running(tmp_path, 2, body, out=terminal)


def test_the_size_of_our_terminal_changes(tmp_path: Path, terminal: int) -> None:
    code = """
import os, signal
signal.signal(signal.SIGWINCH, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print(*os.get_terminal_size(1), flush=True)
signal.sigwait([signal.SIGWINCH])
print(*os.get_terminal_size(1))
"""

    async def body(run: Run) -> None:
        process = run.start(0, code, terminal=True)
        run.start(1, "pass").wait()
        await until(lambda: run.log(0) == b"86 30\n")
        termios.tcsetwinsize(terminal, (20, 50))
        assert run.output.resized() == [0]
        process.send_signal(28)
        assert await run.output.drained(PATIENCE) == []
        assert run.log(0) == b"86 30\n46 20\n"
        assert run.output.resized() == []

    running(tmp_path, 2, body, out=terminal)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)
