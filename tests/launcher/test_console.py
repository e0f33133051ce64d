"""What people see, on a real pseudo-terminal, a pipe or a file; a small emulator tells what a terminal shows."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.launcher.output.console import sink as sink_module
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.display import Display, FailureText
from phalanx.launcher.output.console.line_model import LineModel, columns, overwrite, plain
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.shown_stream import ShownStream
from phalanx.launcher.output.filters import Std

PATIENCE = 20.0
CUT = re.compile(r"\x1b(\[[0-9;?]*)?$")  # the beginning of a control sequence


def until(condition: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what()}"
        time.sleep(0.002)


class Screen:
    """What a terminal shows after some bytes; rows that have left it at the top are kept."""

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
    """A pseudo-terminal with somebody who reads it."""

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
        """What is shown by what was read so far; a character or sequence that is cut off there is left out."""
        text = codecs.getincrementaldecoder("utf-8")().decode(self.data)
        return Screen(self.width, self.height).feed(CUT.sub("", text).encode())

    @property
    def rows(self) -> list[str]:
        return self.screen.rows

    def until(self, *rows: str) -> None:
        until(lambda: self.rows == list(rows), lambda: self.rows)

    def until_all(self, rows: list[str], *, last: int = 0) -> None:
        """In any order, except for the last ones."""

        def all_there() -> bool:
            shown = self.rows  # once: the console may be repainting
            ordered = shown[-last:] == rows[-last:] if last else True
            return ordered and sorted(filter(None, shown)) == sorted(filter(None, rows))

        until(all_there, lambda: self.rows)

    def close(self) -> None:
        os.close(self.fd)
        self._reader.join(PATIENCE)
        os.close(self.master)


class Worker:
    """Somebody who appends to a log, as the pump does."""

    def __init__(self, console: Console, rank: int, stream: Std = Std.OUT, *, live: bool = False) -> None:
        self._log = os.memfd_create("log")
        self._feed: LogTail = console.attach(rank, stream, self._log, 0, live=live)

    def write(self, data: bytes | str) -> None:
        os.write(self._log, data.encode() if isinstance(data, str) else data)
        self._feed.grew(os.fstat(self._log).st_size)

    def end(self) -> None:
        self._feed.end()
        os.close(self._log)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


@contextlib.contextmanager
def showing(world: int, terminal: Terminal, **options: object) -> Iterator[Console]:
    console = Console(world, out=terminal.fd, err=terminal.fd, colour=False, **options)  # type: ignore[arg-type]
    try:
        yield console
    finally:
        console.abandon()  # a test that fails does not wait
        console.close()


class Captured:
    """Our stdout and stderr as files, which are not terminals unless it is said that they are."""

    def __init__(self, world: int, **options: object) -> None:
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        self.console = Console(world, out=self._out, err=self._err, **options)  # type: ignore[arg-type]
        self._said = 0

    def caught_up(self) -> None:
        """Everything written so far has been shown: what is said after it is on stderr, which is flushed last."""
        self._said += 1
        self.console.say(f"mark {self._said}.")
        until(lambda: f"mark {self._said}.".encode() in self.err)

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
    """A worker that writes this, and ends."""
    worker = Worker(console, rank, stream)
    worker.write(data)
    worker.end()


# -- lines, anywhere


def test_lines_have_their_rank_before_them_and_go_to_their_stream() -> None:
    with Captured(2) as shown:
        once(shown.console, 1, "a\nb\n\n")
        once(shown.console, 0, "oops\n", Std.ERR)
        shown.console.close()
        assert shown.out == b"[1] a\n[1] b\n[1] \n"
        assert shown.err == b"[0] oops\n"


@pytest.mark.parametrize(("world", "expected"), [(10, b"[3] x\n[9] x\n"), (11, b"[ 3] x\n[ 9] x\n")])
def test_ranks_are_aligned(world: int, expected: bytes) -> None:
    with Captured(world) as shown:
        once(shown.console, 3, "x\n")
        once(shown.console, 9, "x\n")
        shown.console.close()
        assert shown.out == expected


@pytest.mark.parametrize(
    ("prefixes", "expected"), [({}, b"x\n"), ({0: "[trainer0]:"}, b"[trainer0]:x\n"), ({0: ""}, b"x\n")]
)
def test_one_rank_has_no_prefix_unless_asked_for(prefixes: dict[int, str], expected: bytes) -> None:
    with Captured(1, prefixes=prefixes) as shown:
        once(shown.console, 0, "x\n")
        shown.console.close()
        assert shown.out == expected


@pytest.mark.parametrize(
    ("colour", "expected"),
    [(True, b"\x1b[32m[1]\x1b[0m x\n"), (False, b"[1] x\n"), (None, b"[1] x\n")],
)
def test_colour_is_what_was_asked_for(colour: bool | None, expected: bytes) -> None:
    with Captured(2, colour=colour) as shown:
        once(shown.console, 1, "x\n")
        shown.console.close()
        assert shown.out == expected


def test_escapes_in_a_message_are_shown_and_not_sent(terminal: Terminal) -> None:
    odd = "node 1 (\x1b]52;c;cm0K\x07): \x1b[2Jall is well\r"
    with tempfile.TemporaryFile() as file:
        console = Console(2, out=file.fileno(), err=terminal.fd)
        console.waiting(odd)
        console.say(odd)
        console.say(FailureText(odd))
        console.say("the end")
        console.close()
    until(lambda: b"the end" in terminal.data, lambda: terminal.data)
    # Only what the console itself writes is left: colours, and what erases the status line.
    left = re.sub(rb"\x1b\[[0-9;]*[mKJA]|[\r\n]", b"", terminal.data)
    assert b"\x1b" not in left
    assert b"\x07" not in left
    assert left.count(rb"\x1b]52;c;cm0K\x07): \x1b[2Jall is well") >= 2


def test_colour_is_on_where_the_stream_is_a_terminal(terminal: Terminal) -> None:
    with tempfile.TemporaryFile() as file:
        console = Console(2, out=file.fileno(), err=terminal.fd)
        once(console, 0, "x\n", Std.OUT)
        once(console, 0, "x\n", Std.ERR)
        console.close()
        assert os.pread(file.fileno(), 100, 0) == b"[0] x\n"
    terminal.until("[0] x")
    assert b"\x1b[36m[0]\x1b[0m x" in terminal.data


def test_lines_are_whole_however_ranks_take_turns() -> None:
    with Captured(3) as shown:
        workers = [Worker(shown.console, rank) for rank in range(3)]
        for part in ("one ", "line ", "each\n", "and no end"):
            for worker in workers:
                worker.write(part)
            shown.caught_up()
        whole = [b"[%d] one line each" % rank for rank in range(3)]
        assert sorted(shown.out.splitlines()) == whole
        for worker in workers:
            worker.end()
        shown.console.close()
        assert sorted(shown.out.splitlines()) == sorted(whole + [b"[%d] and no end" % rank for rank in range(3)])


def test_long_lines_of_several_ranks_are_whole() -> None:
    with Captured(2) as shown:
        workers = [Worker(shown.console, rank) for rank in range(2)]
        for _ in range(50):
            for rank, worker in enumerate(workers):
                worker.write(b"%d" % rank * 200_000)
        for worker in workers:
            worker.end()
        shown.console.close()
        assert sorted(shown.out.splitlines()) == [b"[%d] " % rank + b"%d" % rank * 10_000_000 for rank in range(2)]


def test_a_line_without_end_is_broken_not_lost() -> None:
    lines = LineModel(limit=1000)
    shown = b"".join(lines.feed(b"x" * 300) for _ in range(20))
    assert shown == (b"x" * 1000 + b"\n") * 5  # it does not wait for the end
    assert lines.end() == b"x" * 1000 + b"\n"


def test_what_a_full_disk_does_not_take_is_counted() -> None:
    full, err = os.open("/dev/full", os.O_WRONLY), os.memfd_create("err")
    try:
        console = Console(1, out=full, err=err)
        once(console, 0, b"lost\n")
        console.close()
        assert b"5 bytes of output could not be written to stdout: the disk is full" in os.pread(err, 1 << 16, 0)
    finally:
        os.close(full)
        os.close(err)


@pytest.mark.parametrize("piece", [b"\x1b[31mx\x1b[0m", b"\x1b[A\x1b[31mx", b"x\r\x1b[K", b"\x1b", b"\r"])
def test_a_line_of_nothing_but_escapes_costs_no_more_than_others(piece: bytes) -> None:
    with Captured(2, terminal=True) as shown:
        began = time.process_time()
        once(shown.console, 1, piece * (1_000_000 // len(piece)))
        shown.console.close()
        assert time.process_time() - began < 20.0  # of what is quadratic there would be hours


def test_stdout_and_stderr_in_one_pipe_keep_their_order() -> None:
    reader, writer = os.pipe()
    again = os.dup(writer)
    console = Console(2, out=writer, err=again)
    for number in range(50):
        once(console, 0, f"err {number}\n", Std.ERR)
        once(console, 0, f"out {number}\n", Std.OUT)
    console.say("after")
    console.close()
    expected = [f"[0] {name} {number}\n" for number in range(50) for name in ("err", "out")]
    assert os.read(reader, 65536).decode() == "".join([*expected, "phalanx: after\n"])
    for fd in (reader, writer, again):
        os.close(fd)


def test_what_the_log_does_not_take_is_shown_in_its_place() -> None:
    with Captured(2) as shown:
        worker = Worker(shown.console, 1)
        worker.write("in the log, ")
        worker._feed.unkept(b"not in the log, ")
        worker.write("in the log again\n")
        worker.end()
        shown.console.close()
        assert shown.out == b"[1] in the log, not in the log, in the log again\n"


# -- the end of the line: carriage returns where there is no terminal


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("\r 10%\r 50%\r100%\n", "100%"),
        ("10%\r50%\r", "50%"),
        ("dos\r\n", "dos"),
        ("long text\rshort\n", "shorttext"),
        ("\r 10% bar\r         \rdone\n", "done"),
        ("working \x1b[31mred\x1b[0m\r\x1b[2Kdone\n", "done"),
        ("\x1b[32m50%\x1b[0m\r\x1b[32m99%\x1b[0m\n", "\x1b[32m99%\x1b[0m"),
        ("\x1b[?25lhidden\x1b[?25h\x1b[5;5Hcursor\n", "hiddencursor"),
        ("löng\rä\n", "äöng"),
    ],
)
def test_a_line_is_shown_in_its_last_state(written: str, expected: str) -> None:
    with Captured(2) as shown:
        once(shown.console, 0, written)
        shown.console.close()
        assert shown.out.decode() == f"[0] {expected}\n"


def test_a_bar_that_is_wiped_leaves_nothing() -> None:
    with Captured(2) as shown:
        once(shown.console, 0, "\r 50%|####     |\r               \r")
        shown.console.close()
        assert shown.out == b""


def test_a_bar_gives_a_sign_of_life_in_a_log() -> None:
    with Captured(2, bar_interval=0.05) as shown:
        worker = Worker(shown.console, 1)
        worker.write("\r 10%\r 20%")
        until(lambda: shown.out == b"[1]  20%\n", lambda: shown.out)
        worker.write("\r 30%")
        until(lambda: shown.out == b"[1]  20%\n[1]  30%\n", lambda: shown.out)
        worker.write("\n")  # what was just shown is not shown again
        worker.write("next\n")
        worker.end()
        shown.console.close()
        assert shown.out == b"[1]  20%\n[1]  30%\n[1] next\n"


def test_a_bar_in_a_log_is_quiet_in_between() -> None:
    with Captured(2) as shown:
        worker = Worker(shown.console, 1)
        for percent in range(101):
            worker.write(f"\r{percent}%")
            if percent % 10 == 0:
                shown.caught_up()
        assert shown.out == b""
        worker.end()
        shown.console.close()
        assert shown.out == b"[1] 100%\n"


def test_bars_below_each_other_are_shown_in_their_last_state() -> None:
    with Captured(2) as shown:
        worker = Worker(shown.console, 1)
        for percent in range(0, 101, 10):
            worker.write(f"\r0: {percent}%" + f"\n\r1: {percent}%\x1b[A")
            shown.caught_up()
        worker.end()
        shown.console.close()
        # When the first newline comes, nobody knows yet that the cursor will move up again.
        assert shown.out.decode().splitlines() == ["[1] 0: 0%", "[1] 0: 100%", "[1] 1: 100%"]


def test_lines_after_bars_are_not_held_back() -> None:
    with Captured(2, quiet=0.02) as shown:
        worker = Worker(shown.console, 1)
        worker.write("\r0: 50%\n\r1: 50%\x1b[A\r0: 100%\n\r1: 100%\nsaving\n")
        until(lambda: shown.out.endswith(b"[1] 1: 100%\n[1] saving\n"), lambda: shown.out)
        worker.end()


# -- the terminal


def test_an_unfinished_line_of_the_live_rank_is_shown_when_it_is_quiet(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        live.write("name? ")
        other.write("never shown unfinished")
        terminal.until("[0] name?")
        before = len(terminal.data)
        live.write("hello\n")
        terminal.until("[0] name? hello")
        # What the user typed behind the prompt was echoed by the terminal: nothing may be painted over it.
        assert terminal.data[before:] == b"hello\r\n"
        live.end()
        other.end()


def test_a_prompt_stays_below_the_lines_of_others(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        live.write("(Pdb) ")
        terminal.until("[0] (Pdb)")
        other.write("one\ntwo\n")
        terminal.until("[1] one", "[1] two", "[0] (Pdb)")
        console.say("hello")
        terminal.until("[1] one", "[1] two", "phalanx: hello", "[0] (Pdb)")
        assert (terminal.screen.x, terminal.screen.y) == (len("[0] (Pdb) "), 3)
        live.end()
        other.end()


@pytest.mark.parametrize("typed", ["Ann\n", "", "An"])
def test_a_prompt_on_stderr_is_left_when_the_rank_goes_on(terminal: Terminal, typed: str) -> None:
    with showing(2, terminal) as console:
        err, out = Worker(console, 0, Std.ERR, live=True), Worker(console, 0, live=True)
        err.write("name? ")  # Python's input() writes its prompt there
        terminal.until("[0] name?")
        os.write(terminal.fd, typed.encode())  # as a terminal echoes it
        out.write("hello\n")
        terminal.until(f"[0] name? {typed}".strip(), "[0] hello")
        err.write("a warning\n")
        terminal.until(f"[0] name? {typed}".strip(), "[0] hello", "[0] a warning")
        err.end()
        out.end()


def test_a_prompt_below_bars_that_are_finished(terminal: Terminal) -> None:
    with showing(2, terminal, quiet=0.02) as console:
        err, other = Worker(console, 0, Std.ERR, live=True), Worker(console, 1)
        err.write("\router 0%\n\rinner\x1b[A\n\r     \r\x1b[A\router 100%\nname? ")
        terminal.until("[0] outer 100%", "[0] name?")
        until(lambda: other.write("x\n") or terminal.rows[-3:-1] == ["[1] x", "[1] x"])
        assert terminal.rows[-1] == "[0] name?"
        err.end()
        other.end()


def test_the_bar_of_the_live_rank_is_repainted_below_everything(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        bar = Worker(console, 0, Std.ERR, live=True)
        out = Worker(console, 0, live=True)
        other = Worker(console, 1, Std.ERR)
        bar.write("\r  0%|          |")
        terminal.until("[0]   0%|          |")
        other.write("\r 12%| not alive\r")
        other.write("from one         \n")
        terminal.until("[1] from one", "[0]   0%|          |")
        bar.write("\r 50%|#####     |")
        terminal.until("[1] from one", "[0]  50%|#####     |")
        out.write("from zero\n")
        console.say("from us")
        terminal.until("[1] from one", "[0] from zero", "phalanx: from us", "[0]  50%|#####     |")
        bar.write("\r100%|##########|\n")
        out.write("done\n")
        terminal.until("[1] from one", "[0] from zero", "phalanx: from us", "[0] 100%|##########|", "[0] done")
        for worker in (bar, out, other):
            worker.end()


def test_a_wide_unfinished_line_is_taken_away_as_a_whole() -> None:
    terminal = Terminal(width=20)
    with showing(2, terminal) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        live.write("." * 50)
        terminal.until("[0] " + "." * 16, "." * 20, "." * 14)
        other.write("line\n")
        terminal.until("[1] line", "[0] " + "." * 16, "." * 20, "." * 14)
        live.write("\n日本語日本語日本語?")
        terminal.until("[1] line", "[0] " + "." * 16, "." * 20, "." * 14, "[0] 日本語日本語日本語?")
        live.end()
        other.end()
    terminal.close()


def test_more_bars_than_the_screen_has_rows() -> None:
    terminal = Terminal(height=4)
    with showing(2, terminal) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        live.write("\n".join(f"bar {n}" for n in range(6)) + "\x1b[5A")
        for n in range(3):
            other.write(f"line {n}\n")
            until(lambda n=n: f"[1] line {n}" in terminal.rows and terminal.rows[-1] == "[0] bar 5")
        assert [row for row in terminal.rows if "line" in row] == [f"[1] line {n}" for n in range(3)]
        live.end()
        other.end()
    terminal.close()


def test_bars_of_tqdm_below_each_other(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        live, other = Worker(console, 0, Std.ERR, live=True), Worker(console, 1)

        def update(percent: int) -> None:
            live.write(f"\router {percent}%")
            live.write(f"\n\rinner {percent}%\x1b[A")

        update(0)
        terminal.until("[0] outer 0%", "[0] inner 0%")
        other.write("hello\n")
        terminal.until("[1] hello", "[0] outer 0%", "[0] inner 0%")
        update(50)
        terminal.until("[1] hello", "[0] outer 50%", "[0] inner 50%")
        live.write("\n\r         \r\x1b[A")  # the inner one is closed and not left
        live.write("\router 100%\n")
        other.write("bye\n")
        terminal.until_all(["[1] hello", "[0] outer 100%", "[1] bye"])
        live.end()
        other.end()


def test_bars_that_are_seldom_updated_stay_at_the_bottom(terminal: Terminal) -> None:
    with showing(2, terminal, quiet=0.001) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        live.write("\x1b[?25lone\ntwo")
        live.write("\r\x1b[2K\x1b[1A\x1b[2Kone 1\ntwo 1")  # as rich does, with the cursor hidden
        terminal.until("[0] one 1", "[0] two 1")
        for n in range(30):
            other.write(f"line {n}\n")
            until(lambda n=n: f"[1] line {n}" in terminal.rows, lambda: terminal.rows)
        assert terminal.rows == [*(f"[1] line {n}" for n in range(30)), "[0] one 1", "[0] two 1"]
        live.end()
        other.end()


RICH = """
import os, sys
from rich.console import Console
from rich.progress import Progress
console = Console(force_terminal=True, width=60)
with Progress(console=console, auto_refresh=False) as progress:
    tasks = [progress.add_task(name, total=4) for name in ("first", "second", "third")]
    for step in range(3):
        for task in tasks:
            progress.update(task, completed=step + 1)  # not 0, which was painted before the other rows were there
        progress.refresh()
        if step == 1:
            progress.console.print("a line above")
        sys.stdout.flush()
        os.write(2, b"painted\\n")
        sys.stdin.readline()
"""


def test_bars_of_rich(terminal: Terminal) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RICH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process, showing(2, terminal) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        os.set_blocking(process.stdout.fileno(), False)
        alone = b""
        for step in range(4):
            process.stderr.readline()  # it has painted
            alone += (painted := process.stdout.read() or b"")
            for byte in range(0, len(painted), 7):
                live.write(painted[byte : byte + 7])
            expected = [f"[0] {row}".rstrip() for row in Screen(60).feed(alone).rows]
            others = [f"[1] {n}" for n in range(step)]
            terminal.until_all(others + expected, last=3)
            if step < 3:
                assert not terminal.screen.modes["25"]  # rich has hidden the cursor
                other.write(f"{step}\n")
                until(lambda step=step: f"[1] {step}" in terminal.rows, lambda: terminal.rows)
                process.stdin.write(b"\n")
                process.stdin.flush()
        until(lambda: terminal.screen.modes["25"])
        terminal.until_all(others + expected, last=3)
        assert "[0] a line above" in expected
        live.end()
        other.end()


def test_ranks_that_are_not_live_do_not_touch_the_terminal(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        once(console, 1, "\x1b[?25l\x1b[?1049h\x1b[2J\x1b[10;10Hboo\x1b[31m\nred\n")
        terminal.until("[1] boo", "[1] red")
        assert terminal.screen.modes == {}
        assert b"\x1b[31m\x1b[0m\r\n" in terminal.data  # a colour ends with its line


def test_one_rank_has_the_terminal_to_itself(terminal: Terminal) -> None:
    raw = bytes(range(1, 10)) + b"\x1b[2J\x1b[5;5H\x1b[31m\r50%\r" + bytes(range(128, 256))
    with showing(1, terminal) as console:
        live = Worker(console, 0, live=True)
        live.write(raw)
        until(lambda: terminal.data == raw.replace(b"\n", b"\r\n"), lambda: terminal.data)
        live.end()


# -- phalanx itself


def test_what_we_say_is_never_in_a_line_of_a_worker(terminal: Terminal) -> None:
    with showing(1, terminal) as console:
        live = Worker(console, 0, live=True)
        live.write("no newline")
        terminal.until("no newline")
        console.say("said")
        terminal.until("no newline", "phalanx: said")
        live.write("next\n")
        terminal.until("no newline", "phalanx: said", "next")
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


# -- the end


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
    # The alternate screen is left before anything is said about the end: it would go with it.
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
        console.say("the other stream goes on")
        console.close()
        os.close(writer)
        assert os.pread(errors.fileno(), 100, 0) == b"phalanx: the other stream goes on\n"


def test_descriptors_that_are_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    console = Console(2, out=writer, err=writer)
    once(console, 0, "x\n")
    console.say("y")
    console.close()
    assert not console.terminal(Std.OUT)


def test_a_pipe_that_somebody_made_non_blocking() -> None:
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
    reader, writer = os.pipe()  # that nobody reads
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


def test_last_words_of_ours_are_shown_even_so() -> None:
    with Captured(2) as shown:
        shown.console.abandon()
        once(shown.console, 0, "not this\n")
        shown.console.say("ending at once")
        shown.console.close()
        assert (shown.out, shown.err) == (b"", b"phalanx: ending at once\n")


# -- properties

TOKENS = ["a", "bcd", "é", " ", "\n", "\r", "\r\n", "\x1b[A", "\x1b[2A", "\x1b[K", "\x1b[2K", "\x1b[J"]
TOKENS += ["\x1b[31m", "\x1b[0m", "\x1b[?25l", "\x1b", "\x1b[", "\x1b[12345"]
STREAMS = st.lists(st.sampled_from(TOKENS), max_size=30).map(lambda tokens: "".join(tokens).encode())


@st.composite
def chunked(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> list[bytes]:
    text = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=500, deadline=None)
@given(chunked(STREAMS), st.sampled_from([3, 7, 1 << 20]))
@example([b"x\x1b", b"[A\ry\n"], 1 << 20)
@example([b"abc\r", b"\n"], 1 << 20)
@example([b"abc\r", b"\n\x1b[Ax"], 1 << 20)
def test_any_chunks_of_a_stream_give_the_same_lines(chunks: list[bytes], limit: int) -> None:
    whole, pieces = LineModel(limit=limit), LineModel(limit=limit)
    expected = whole.feed(b"".join(chunks)) + whole.end()
    assert b"".join(pieces.feed(chunk) for chunk in chunks) + pieces.end() == expected


@settings(max_examples=300, deadline=None)
@given(chunked(st.text("ab\n\r ", max_size=60).map(str.encode)))
def test_lines_are_what_a_terminal_would_show(chunks: list[bytes]) -> None:
    lines = LineModel()
    shown = b"".join(lines.feed(chunk) for chunk in chunks) + lines.end()
    rows = [row.rstrip() for row in shown.decode().split("\n")]
    while rows and not rows[-1]:
        rows.pop()
    assert rows == Screen().feed(b"".join(chunks)).rows


BARS = ["a", "bcd ", "é", "\n", "\n", "\r", "\x1b[A\r", "\r\x1b[2A", "\r\x1b[K", "\r\x1b[J"]
BARS += ["\r\x1b[2K\x1b[1A\x1b[2K", "\x1b[32mgreen\x1b[0m"]
MOVING = st.lists(st.sampled_from(BARS), max_size=25).map(lambda tokens: "".join(tokens).encode())


@settings(max_examples=150, deadline=None)
@given(chunked(MOVING))
def test_a_live_rank_that_nobody_disturbs_sees_a_terminal_of_its_own(chunks: list[bytes]) -> None:
    above = b"".join(b"line %d\n" % n for n in range(20))  # a cursor cannot leave a terminal at the top
    with Captured(2, terminal=True, prefixes={0: ""}, quiet=0.0) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_module, "REPAINT", 0.0)
        live = Worker(shown.console, 0, live=True)
        for chunk in [above, *chunks]:
            live.write(chunk)
            shown.caught_up()
        assert Screen().feed(shown.out).rows == Screen().feed(above + b"".join(chunks)).rows
        live.end()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(BARS), st.none()), max_size=25))
def test_lines_of_others_are_whole_whatever_the_live_rank_does(tokens: list[str | None]) -> None:
    with Captured(2, terminal=True, colour=False) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_module, "REPAINT", 0.0)
        live, other = Worker(shown.console, 0, live=True), Worker(shown.console, 1)
        count = 0
        for token in tokens:
            if token is None:
                other.write(f"line {count}\n")
                count += 1
            else:
                live.write(token)
            shown.caught_up()
        live.end()
        other.end()
        shown.console.close()
        rows = Screen().feed(shown.out).rows
        assert [row for row in rows if row.startswith("[1]")] == [f"[1] line {n}" for n in range(count)]
        assert all(row.startswith(("[0]", "[1]")) or not row for row in rows), rows


@given(st.text("ab ", max_size=8), st.text("ab ", max_size=8))
def test_to_overwrite(old: str, new: str) -> None:
    shown = overwrite(old.encode(), new.encode()).decode()
    assert shown.rstrip() == (new + old[len(new) :]).rstrip()


def test_text_without_what_is_not_text() -> None:
    link = b"\x1b]8;;http://a\x1b\\name\x1b]8;;\x1b\\"
    assert plain(b"\x1b[1;31mred\x1b[0m \x1b[2K" + link + b"\xff") == "red name\N{REPLACEMENT CHARACTER}"
    assert [columns(text) for text in (b"ab", b"\x1b[31mab", "日本".encode(), "é".encode(), b"\t|")] == [2, 2, 4, 1, 9]


# -- hidden


def test_nothing_is_written_while_hidden_and_what_was_said_is_said_afterwards(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        worker = Worker(console, 1, Std.OUT)
        worker.write("before\n")
        console.say("one")
        console.hide()
        until(lambda: b"before" in terminal.data and b"one" in terminal.data, lambda: terminal.data)
        seen = terminal.data
        worker.write("meanwhile\n")
        console.say("two")
        console.waiting("for somebody")
        once(console, 0, "meanwhile too\n")
        time.sleep(0.2)  # longer than an unfinished line waits
        assert terminal.data == seen
        console.show()
        until(lambda: b"two" in terminal.data, lambda: terminal.data)
        worker.write("after\n")
        until(lambda: b"[1] after" in terminal.data, lambda: terminal.data)
        console.waiting(None)
        worker.end()
    assert b"meanwhile" not in terminal.data


def test_last_words_are_said_though_it_was_never_shown_again() -> None:
    with Captured(2, terminal=True, colour=False) as shown:
        shown.console.hide()
        for number in range(600):
            shown.console.say(f"word {number}")
        once(shown.console, 1, "unseen\n")
        shown.console.close()
        said = shown.err.decode().splitlines()
        assert said[-1] == "phalanx: word 599"
        assert len(said) == 500
        assert shown.out == b""


def test_a_file_gets_what_a_terminal_does_not_show(terminal: Terminal) -> None:
    """`phalanx run --screen train.py 2>errors`"""
    file = os.memfd_create("err")
    console = Console(2, out=terminal.fd, err=file, colour=False)
    try:
        console.hide()
        once(console, 0, "unseen\n")
        once(console, 1, "a warning\n", Std.ERR)
        console.say("one")
        until(lambda: os.pread(file, 1000, 0) == b"[1] a warning\nphalanx: one\n", lambda: os.pread(file, 1000, 0))
    finally:
        console.close()
        os.close(file)
    assert b"unseen" not in terminal.data


TRACED = b'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError: bad\n'


def failing(console: Console, rank: int, folder: Path) -> LogTail:
    """A worker that prints a line and its last traceback, as torch does."""
    (folder / "traceback.txt").write_bytes(TRACED)
    tail = console.attach(rank, Std.ERR, None, 0, live=False, traceback=str(folder / "traceback.txt"))
    tail.unkept(b"a warning\n" + b"".join(b"[rank%d]: %b" % (rank, line) for line in TRACED.splitlines(keepends=True)))
    return tail


def test_a_traceback_is_not_shown_once_its_failure_was_reported(tmp_path: Path) -> None:
    with Captured(2) as shown:
        failing(shown.console, 1, tmp_path).end()
        shown.caught_up()
        shown.console.say("rank 1 failed: ValueError: bad")
        shown.console.drop_withheld()
        shown.console.close()
        assert shown.err == b"[1] a warning\nphalanx: mark 1.\nphalanx: rank 1 failed: ValueError: bad\n"


def test_a_traceback_that_nothing_reports_is_shown_at_the_end_with_one_prefix(tmp_path: Path) -> None:
    with Captured(2) as shown:
        failing(shown.console, 1, tmp_path).end()
        shown.console.close()
        text = b"".join(b"[1] " + line for line in TRACED.splitlines(keepends=True))
        assert shown.err == b"[1] a warning\n" + text


def test_the_traceback_of_a_rank_that_succeeded_is_shown_and_that_of_a_living_one_waits(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    with Captured(2) as shown:
        failing(shown.console, 0, tmp_path / "0").end()
        living = failing(shown.console, 1, tmp_path / "1")
        shown.caught_up()
        shown.console.drop_withheld(ended=True)
        shown.caught_up()
        assert b"ValueError" not in shown.err
        shown.console.release_withheld([1])
        shown.caught_up()
        assert shown.err.count(b"[1] ValueError: bad") == 1
        assert b"[0] ValueError" not in shown.err
        living.end()


def test_a_failure_is_in_colour_on_a_terminal() -> None:
    block = "rank 1 failed: ValueError: bad\n  /w/a.py:3 in f\n      f(x)\n  afterwards: rank 0 lost the peer"
    with Captured(2, terminal=True) as shown:
        shown.console.say(FailureText(block))
        shown.caught_up()
        head, place, source, others = shown.err.splitlines()[:4]
        assert head == b"\x1b[1;31mphalanx: rank 1 failed: ValueError: bad\x1b[0m"
        assert place == b"  \x1b[36m/w/a.py:3\x1b[0m in f"
        assert source == b"      f(x)"
        assert others == b"\x1b[2m  afterwards: rank 0 lost the peer\x1b[0m"
    with Captured(2) as shown:
        shown.console.say(FailureText(block))
        shown.caught_up()
        assert shown.err.startswith(f"phalanx: {block}\n".encode())


def test_streams_that_wait_for_nothing_cost_nothing() -> None:
    """The console of a leader has two streams per rank: only those with an unfinished line are looked at."""
    looked: list[int] = []

    class Counted(ShownStream):
        def due(self, quiet: float) -> float | None:
            looked.append(self.rank)
            return super().due(quiet)

    lock, sink = threading.RLock(), sink_module.Sink(os.open(os.devnull, os.O_WRONLY), terminal=False)
    display = Display(sink, sink, lock, alone=False, quiet=0.1, bar_interval=10.0, colour=False)
    streams = []
    for rank in range(100):
        tail = LogTail(lock, lambda: None, None, 0)
        stream = Counted(sink, LineModel(live=False), tail, live=False)
        stream.rank = rank
        display.add(stream, first=False)
        tail.unkept(b"first\nsecond\r\n\x1b[1A" if rank == 7 else b"a line\n")
        streams.append(stream)
        display.show(stream)
    assert [stream.rank for stream in streams if stream.due(0.1) is not None] == [7]
    looked.clear()
    display.due()
    display.tick(time.monotonic())
    assert set(looked) == {7}
    for stream in streams:
        stream.tail.end()
        display.show(stream)
    assert display.streams == ()
    assert display.due() is None
    os.close(sink.fd)
