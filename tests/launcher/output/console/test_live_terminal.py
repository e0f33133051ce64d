"""The live rank on a terminal: prompts and progress bars, below the lines of the others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from phalanx.launcher.output.filters import Std
from tests.launcher.output.console.emulator import Screen, Terminal, Worker, once, showing, until


def test_an_unfinished_line_of_the_live_rank_is_shown_when_it_is_quiet(terminal: Terminal) -> None:
    with showing(2, terminal) as console:
        live, other = Worker(console, 0, live=True), Worker(console, 1)
        live.write("name? ")
        other.write("never shown unfinished")
        terminal.until("[0] name?")
        before = len(terminal.data)
        live.write("hello\n")
        terminal.until("[0] name? hello")
        # The terminal has echoed what the user typed after the prompt: nothing may be painted over it.
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
def test_a_prompt_on_stderr_is_left_when_the_rank_continues(terminal: Terminal, typed: str) -> None:
    with showing(2, terminal) as console:
        err, out = Worker(console, 0, Std.ERR, live=True), Worker(console, 0, live=True)
        err.write("name? ")  # Python's input() writes its prompt there
        terminal.until("[0] name?")
        os.write(terminal.fd, typed.encode())  # echoed like by a terminal
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
        live.write("\r\x1b[2K\x1b[1A\x1b[2Kone 1\ntwo 1")  # like rich, with the cursor hidden
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
