"""Messages of phalanx on the console, and the end of the console."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
import termios
import threading
import weakref

from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.filters import Std
from tests.launcher.output.console.emulator import PATIENCE, Captured, Terminal, Worker, once, showing, until


def test_what_we_say_is_never_in_a_line_of_a_worker(terminal: Terminal) -> None:
    with showing(1, terminal) as console:
        live = Worker(console, 0, live=True)
        live.write("no newline")
        terminal.until("no newline")
        console.say("a line")
        terminal.until("no newline", "phalanx: a line")
        live.write("next\n")
        terminal.until("no newline", "phalanx: a line", "next")
        live.end()


def test_what_we_say_is_wrapped_on_a_terminal() -> None:
    terminal = Terminal(width=40)
    with showing(2, terminal) as console:
        console.say("node 1 of 2 has not joined (60 s). Missing: ranks 8-9.\n  fix: phalanx run --master a …")
        terminal.until(
            "phalanx: node 1 of 2 has not joined (60",
            "  s). Missing: ranks 8-9.",
            "  fix: phalanx run --master a …",
        )
    terminal.close()


def test_what_we_say_is_not_wrapped_in_a_log() -> None:
    with Captured(2) as shown:
        shown.console.say("long " * 100 + "\n  detail")
        shown.console.close()
        assert shown.err.decode() == "phalanx: " + "long " * 100 + "\n  detail\n"
        shown.console.say("after the end")
        assert shown.err.decode().endswith("  detail\nphalanx: after the end\n")


def test_the_terminal_is_as_it_was(terminal: Terminal) -> None:
    before = termios.tcgetattr(terminal.fd)
    console = Console(1, out=terminal.fd, err=terminal.fd)
    live = Worker(console, 0, live=True)
    live.write("\x1b[?1049h\x1b[?25l\x1b[?2004;")
    live.write("1h\x1b[31mred and gone")
    raw = termios.tcgetattr(terminal.fd)
    raw[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal.fd, termios.TCSANOW, raw)
    until(lambda: b"gone" in terminal.data)
    live.end()
    console.say("rank 0 died")
    console.close()
    until(lambda: b"died" in terminal.data)
    # The alternate screen is left before messages about the end, which would disappear with it.
    assert terminal.data.index(b"\x1b[?1049l") < terminal.data.index(b"died")
    assert terminal.screen.modes == {"1049": False, "25": True, "2004": False, "1": False}
    assert terminal.data.index(b"gone") < terminal.data.index(b"\x1b[0m") < terminal.data.index(b"died")
    assert terminal.screen.x == 0
    assert termios.tcgetattr(terminal.fd) == before


def test_a_quiet_end_leaves_the_terminal_alone(terminal: Terminal) -> None:
    console = Console(2, out=terminal.fd, err=terminal.fd, colour=False)
    once(console, 1, "text\n")
    console.close()
    terminal.until("[1] text")
    os.write(terminal.fd, b"end")
    until(lambda: terminal.data.endswith(b"end"))
    assert terminal.data == b"[1] text\r\nend"


def test_the_last_line_ends(terminal: Terminal) -> None:
    console = Console(1, out=terminal.fd, err=terminal.fd)
    worker = Worker(console, 0, live=True)
    worker.write("no newline")
    worker.end()
    console.close()
    until(lambda: terminal.data == b"no newline\r\n", lambda: terminal.data)


def test_a_reader_that_goes_away_is_no_failure() -> None:
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors:
        console = Console(2, out=writer, err=errors.fileno())
        worker = Worker(console, 0)
        worker.write("first\n")
        assert os.read(reader, 100) == b"[0] first\n"
        os.close(reader)
        for _ in range(100):
            worker.write("x" * 10_000 + "\n")
        worker.end()
        console.say("the other stream continues")
        console.close()
        os.close(writer)
        assert os.pread(errors.fileno(), 100, 0) == b"phalanx: the other stream continues\n"


def test_descriptors_that_are_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    console = Console(2, out=writer, err=writer)
    once(console, 0, "x\n")
    console.say("y")
    console.close()
    assert not console.terminal(Std.OUT)


def test_a_pipe_that_someone_made_non_blocking() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    console = Console(2, out=writer, err=writer)
    text = "".join(f"{n} {'x' * 100}\n" for n in range(5000))
    once(console, 0, text)
    closing = threading.Thread(target=console.close)
    closing.start()
    seen = b""
    expected = "".join(f"[0] {line}\n" for line in text.splitlines()).encode()
    while len(seen) < len(expected):
        seen += os.read(reader, 1 << 16)
    closing.join(PATIENCE)
    assert seen == expected
    os.close(reader)
    os.close(writer)


def test_the_flags_of_our_own_streams_are_not_touched(terminal: Terminal) -> None:
    before = fcntl.fcntl(terminal.fd, fcntl.F_GETFL)
    with showing(2, terminal) as console:
        once(console, 0, "x\n")
        terminal.until("[0] x")
        assert fcntl.fcntl(terminal.fd, fcntl.F_GETFL) == before


def test_to_abandon_is_to_stop_at_once() -> None:
    reader, writer = os.pipe()  # not read
    console = Console(2, out=writer, err=writer)
    for _ in range(4):
        once(console, 0, "x" * 100_000 + "\n")
    closing = threading.Thread(target=console.close)
    closing.start()
    until(lambda: fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4) == (65536).to_bytes(4, sys.byteorder))
    assert closing.is_alive()
    console.abandon()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    os.set_blocking(reader, False)
    left = 0
    with contextlib.suppress(BlockingIOError):
        while more := os.read(reader, 1 << 20):
            left += len(more)
    assert left < 200_000
    os.close(reader)
    os.close(writer)


def test_the_last_message_is_shown_after_abandon() -> None:
    with Captured(2) as shown:
        shown.console.abandon()
        once(shown.console, 0, "not this\n")
        shown.console.say("ending at once")
        shown.console.close()
        assert (shown.out, shown.err) == (b"", b"phalanx: ending at once\n")


def test_a_stream_that_has_ended_is_freed_without_a_collection() -> None:
    """A leader of thousands of nodes ends thousands of them at each regroup."""
    gc.disable()
    try:
        with Captured(2) as shown:
            tail = shown.console.attach(1, Std.OUT, None, 0, live=False)
            freed = weakref.ref(tail)
            tail.unkept(b"the only line\n")
            tail.end()
            del tail
            shown.caught_up()
            shown.caught_up()  # the thread keeps what it has shown last until there is more
            until(lambda: freed() is None)
            assert shown.out == b"[1] the only line\n"
    finally:
        gc.enable()
