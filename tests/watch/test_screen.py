"""The screen under a real pseudo-terminal, of a run that is made up."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.cli import alive, descendants, environment, terminal, until
from tests.kit.handle import resize
from tests.watch.glass import Glass, attributes

_SCRIPT = str(Path(__file__).parent / "simulated.py")
UTF8 = {"LC_ALL": "C.UTF-8", "NO_COLOR": None}


@contextlib.contextmanager
def showing(
    folder: Path,
    *words: str,
    ranks: int = 8,
    rows: int = 24,
    columns: int = 80,
    env: dict[str, str | None] | None = None,
) -> Iterator[Glass]:
    command = (sys.executable, _SCRIPT, str(ranks), "30", str(folder), *words)
    with terminal(words=command, env={**UTF8, **(env or {})}, size=(rows, columns)) as job:
        yield Glass(job, rows, columns)


def test_what_is_seen_and_what_keys_do(tmp_path: Path) -> None:
    with showing(tmp_path) as glass:
        before = attributes(glass)
        text = glass.until(r"100%\|bar")  # the log comes last
        assert attributes(glass) != before
        assert glass.aside
        assert not glass.cursor
        head, progress = text.splitlines()[:2]
        assert "train-simulated" in head
        assert "running" in head
        assert "1 node · 8 ranks · gen 1" in head
        assert "step 29/1000" in progress
        assert "loss 1.5" in progress
        assert len([line for line in text.splitlines() if " gpu " in line and "█" in line]) == 8
        assert "recovered in 0.31 s" in text
        assert "a red word" in text  # neither in red, nor did it clear the screen
        assert glass.colours(3) & {"green", "brown", "cyan"}

        glass.type("j")
        glass.until(r"(?m)^▸.\s+1 gpu 1")
        glass.until("rank 1 stdout line 199")
        glass.type("\x1b[B")
        glass.until("rank 2 stdout line 199")
        glass.type("5")
        glass.until("rank 5 stdout line 199")
        glass.type("e")
        glass.until("rank 5 stderr line 199")
        glass.type("e\x1b[F")  # end
        glass.until("the node of rank 7 does not answer")
        glass.type("\x1b[1~")  # home
        glass.until("rank 0 stdout line 199")

        glass.type("f")
        text = glass.until("rank 0 stdout line 187")  # more of it than before
        assert "rank 0 stdout line 199" in text
        assert not any(" gpu 3 " in line for line in text.splitlines())
        glass.type("\x1b[5~")
        glass.until("20 lines back")
        glass.type("f")

        glass.type("s")
        text = glass.until("frame 16 of 0")
        assert "nothing is wrong" in text
        glass.type("\x1b[6~")
        glass.until("frame 3 of 1")
        glass.type("\x1b")  # by itself: closes what lies over the screen
        glass.until(lambda text: "── stacks" not in text)
        glass.type("?")
        glass.until("a rank by its number")
        glass.type("q")
        glass.until("rank 0 stdout line 199")
        glass.type("g")
        glass.until("● well")
        glass.type("\t")
        glass.until(r"(?m)^▸.\s+0 gpu 0")

        glass.type("\x1b[200~xy\x1b[201~x")  # what is pasted is not typed
        glass.until("stop the run, with all its ranks")
        glass.type("n")
        glass.until(lambda text: "stop the run" not in text)
        assert not (tmp_path / "hands").exists()
        glass.type("xy")
        glass.until("is being stopped")
        until(lambda: (tmp_path / "hands").exists(), 30)
        assert (tmp_path / "hands").read_text() == "stop\n"

        glass.type("q")
        assert glass.job.wait(60) == 0
        assert attributes(glass) == before
        assert glass.cursor
        assert not glass.aside
        assert not glass.afterwards.strip()


def test_other_sizes(tmp_path: Path) -> None:
    with showing(tmp_path, ranks=512) as glass:
        glass.until(r"(?m)^▸.\s+0 node0")
        glass.until(r"ranks 0-\d+ of 512")
        glass.resize(40, 120)
        text = glass.until("── loss ")
        assert "⠒" in text or "⠉" in text
        glass.type("\x1b[F")
        glass.until(r"(?m)^▸.\s+511 node63")
        glass.type("300")
        glass.until(r"(?m)^▸.\s+300 ")
        glass.until("rank 300 stdout line 199")
        glass.resize(10, 40)
        text = glass.until(lambda text: len(text.splitlines()) == 10 and "? help" in text.splitlines()[-1])
        assert "train-simulated" in text
        assert "300" in text
        for rows, columns in ((5, 20), (1, 1), (2, 7), (3, 200)):
            glass.resize(rows, columns)
            glass.type("\x1b[A?q")
        glass.resize(24, 80)
        glass.until(r"(?m)^▸.\s+29\d node37")


def test_without_colours_and_without_unicode(tmp_path: Path) -> None:
    with showing(tmp_path, env={"NO_COLOR": "1", "LC_ALL": "C"}) as glass:
        text = glass.until(r"100%\|bar")
        assert text.isascii()
        assert all(glass.colours(row) == {"default"} for row in range(24))
        assert "####" in text


def test_the_end_of_the_run(tmp_path: Path) -> None:
    with showing(tmp_path) as glass:
        glass.until("running")
        (tmp_path / "over").touch()
        text = glass.until("the run has ended, exit code 0; q leaves")
        assert "done" in text
        glass.type("x")
        glass.until("the run has ended")
        assert not (tmp_path / "hands").exists()
        glass.type("q")
        assert glass.job.wait(60) == 0


def test_below_a_run_it_goes_with_the_run_and_ctrl_c_asks(tmp_path: Path) -> None:
    with showing(tmp_path, "held") as glass:
        glass.until("running")
        glass.type("\x03")
        glass.until("stop the run.*Ctrl-C again")
        glass.type("\x03")
        until(lambda: (tmp_path / "hands").exists(), 30)
        assert (tmp_path / "hands").read_text() == "end now\n"
        (tmp_path / "over").touch()
        glass.until("the run has ended")
        assert glass.job.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_terminal_is_as_it_was_after(number: signal.Signals, tmp_path: Path) -> None:
    with showing(tmp_path) as glass:
        before = attributes(glass)
        glass.until("running")
        glass.job.signal(number)
        assert glass.job.wait(60) == 0
        assert attributes(glass) == before
        assert glass.cursor
        assert not glass.aside


def test_a_debugger_has_the_terminal_for_a_while(tmp_path: Path) -> None:
    with showing(tmp_path) as glass:
        before = attributes(glass)
        glass.until("running")
        glass.type("3d")
        glass.job.wait_for("(Pdb) of")
        assert not glass.aside
        group = os.tcgetpgrp(glass.job._keys)
        assert group != os.getpgid(glass.job.pid)
        glass.type("hello\r")
        glass.job.wait_for("typed hello")
        glass.job.wait_for("Enter goes back")  # it ended badly: what it said stays until then
        assert os.tcgetpgrp(glass.job._keys) == os.getpgid(glass.job.pid)
        glass.type("\r")
        glass.until(r"(?m)^▸.\s+3 gpu 3")
        assert glass.aside
        assert (tmp_path / "hands").read_text() == "debugger 3\n"
        glass.type("q")
        assert glass.job.wait(60) == 0
        assert attributes(glass) == before


def test_ctrl_z_and_fg(tmp_path: Path) -> None:
    with terminal(words=("bash", "--norc", "--noprofile", "-i"), env={**UTF8, "PS1": "$ "}) as job:
        glass = Glass(job)
        glass.until(r"\$")
        glass.type(f"{sys.executable} {_SCRIPT} 8 30 {tmp_path}\r")
        glass.until("train-simulated  running")
        glass.type("\x1a")
        job.wait_for("Stopped")
        until(lambda: not glass.aside, 30)
        assert glass.cursor
        glass.type("echo in the shell\r")
        job.wait_for("in the shell", count=2)
        glass.type("fg\r")
        until(lambda: glass.aside, 30)
        glass.until("train-simulated  running")
        glass.type("\x1a")
        job.wait_for("Stopped", count=2)
        glass.type("fg\r")
        until(lambda: glass.aside, 30)
        raw = attributes(glass)
        os.kill(descendants(job.pid)[0], signal.SIGSTOP)  # it cannot leave the terminal as it was, but comes back
        job.wait_for("Stopped", count=3)
        until(lambda: attributes(glass) != raw, 30)
        glass.type("fg\r")
        until(lambda: attributes(glass) == raw, 30)
        glass.type("q")
        until(lambda: os.tcgetpgrp(job._keys) == os.getpgid(job.pid), 30)  # what is typed before is lost
        glass.type("echo left with $?\r")
        job.wait_for("left with 0")
        glass.type("exit\r")
        job.wait(60)


def test_the_window_is_closed(tmp_path: Path) -> None:
    with showing(tmp_path) as glass:
        glass.until("running")
        glass.job.hang_up()
        assert glass.job.process.wait(60) == 0


def test_it_is_ended_while_a_debugger_has_the_terminal(tmp_path: Path) -> None:
    with showing(tmp_path) as glass:
        before = attributes(glass)
        glass.until("running")
        glass.type("d")
        glass.job.wait_for("(Pdb) of")
        debugger = descendants(glass.job.pid)
        glass.job.signal(signal.SIGTERM)
        assert glass.job.wait(60) == 0
        assert not any(map(alive, debugger))
        assert attributes(glass) == before
        assert not glass.aside


def test_a_terminal_that_takes_nothing_holds_up_nothing(tmp_path: Path) -> None:
    """Of a connection that is stuck: somebody who types q still leaves."""
    screen, tty = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, _SCRIPT, "512", "30", str(tmp_path)],
            env=environment({**UTF8, "TERM": "xterm"}),
            stdin=tty,
            stdout=tty,
            start_new_session=True,
        )
        resize(screen, 100, 500)
        until(lambda: select.select([screen], [], [], 0)[0], 60)
        for key in b"jjjjq":  # each a frame of its own
            time.sleep(0.1)
            os.write(screen, bytes([key]))
        assert process.wait(60) == 0
    finally:
        os.close(tty)
        os.close(screen)
