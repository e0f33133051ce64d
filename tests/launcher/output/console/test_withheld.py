"""Tracebacks that wait for the report of their failure, and the cost of a quiet stream."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from phalanx.launcher.output.console import sink as sink_module
from phalanx.launcher.output.console import withheld
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.output.console.display import Display, FailureText
from phalanx.launcher.output.console.line_model import LineModel
from phalanx.launcher.output.console.log_tail import LogTail
from phalanx.launcher.output.console.shown_stream import ShownStream
from phalanx.launcher.output.filters import Std
from tests.launcher.output.console.emulator import Captured, until

TRACED = b'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\nValueError: bad\n'


def failing(console: Console, rank: int, folder: Path) -> LogTail:
    """A worker that prints a line and its last traceback, as torch does."""
    tail = console.attach(rank, Std.ERR, None, 0, live=False, traceback=str(folder / "traceback.txt"))
    prints_traceback(tail, rank, folder)
    return tail


def prints_traceback(tail: LogTail, rank: int, folder: Path) -> None:
    (folder / "traceback.txt").write_bytes(TRACED)
    tail.unkept(b"a warning\n" + b"".join(b"[rank%d]: %b" % (rank, line) for line in TRACED.splitlines(keepends=True)))


def test_a_traceback_is_not_shown_once_its_failure_was_reported(tmp_path: Path) -> None:
    with Captured(2) as shown:
        failing(shown.console, 1, tmp_path).end()
        shown.caught_up()
        shown.console.say("rank 1 failed: ValueError: bad")
        shown.console.drop_withheld()
        shown.console.close()
        assert shown.err == b"[1] a warning\nphalanx: mark 1.\nphalanx: rank 1 failed: ValueError: bad\n"


def test_the_traceback_of_a_worker_that_has_failed_waits_for_its_report_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement may take longer to train than a traceback waits: the report follows its first step."""
    monkeypatch.setattr(withheld, "DELAY", 0.0)
    with Captured(2) as shown:
        (tmp_path / "hangs").mkdir()
        tail = shown.console.attach(1, Std.ERR, None, 0, live=False, traceback=str(tmp_path / "traceback.txt"))
        shown.console.await_report(tail)
        prints_traceback(tail, 1, tmp_path)
        tail.end()
        failing(shown.console, 0, tmp_path / "hangs")
        until(lambda: b"[0] ValueError: bad" in shown.err, lambda: shown.err)  # it has not exited
        assert b"[1] ValueError" not in shown.err
        shown.console.drop_withheld(ended=True)
        shown.console.close()
        assert b"[1] ValueError" not in shown.err


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


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_single_rank_that_is_replaced_shows_a_traceback_only_if_it_is_not_reported(tmp_path: Path, size: int) -> None:
    """Everything else passes at once, as bytes: unfinished lines, and text that only looks like a traceback."""
    printed = b"T 10%\rT 20%\nTraceback of nothing\n" + TRACED + b"the end"
    (tmp_path / "traceback.txt").write_bytes(TRACED)
    for report in (True, False):
        with Captured(1) as shown:
            tail = shown.console.attach(
                0, Std.ERR, None, 0, live=False, traceback=str(tmp_path / "traceback.txt"), replaces=True
            )
            for start in range(0, len(printed), size):
                tail.unkept(printed[start : start + size])
                if start + size == 7:
                    until(lambda: shown.err == printed[:7], lambda: shown.err)
            tail.end()
            rest = printed.replace(TRACED, b"")
            until(lambda: shown.err == rest, lambda: shown.err)  # noqa: B023
            if report:
                shown.console.drop_withheld()
            shown.console.close()
            assert shown.err == rest + (b"" if report else TRACED)


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
    """The console of a leader has two streams per rank: only those with an unfinished line are checked."""
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
