"""Lines of ranks on the console: prefixes, colours, order, and carriage returns where there is no terminal."""

from __future__ import annotations

import os
import re
import tempfile
import time

import pytest

from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.display import FailureText
from phalanx.launcher.output.console.line_model import LineModel
from phalanx.launcher.output.filters import Std
from tests.launcher.output.console.emulator import Captured, Terminal, Worker, once, until


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
    # Only output of the console itself remains: colours, and sequences that erase the status line.
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
        assert time.process_time() - began < 20.0  # a quadratic algorithm would take hours


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
        worker.write("\n")  # text that was just shown is not shown again
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
        # At the first newline it is unknown that the cursor will move up again.
        assert shown.out.decode().splitlines() == ["[1] 0: 0%", "[1] 0: 100%", "[1] 1: 100%"]


def test_lines_after_bars_are_not_held_back() -> None:
    with Captured(2, quiet=0.02) as shown:
        worker = Worker(shown.console, 1)
        worker.write("\r0: 50%\n\r1: 50%\x1b[A\r0: 100%\n\r1: 100%\nsaving\n")
        until(lambda: shown.out.endswith(b"[1] 1: 100%\n[1] saving\n"), lambda: shown.out)
        worker.end()
