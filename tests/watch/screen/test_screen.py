"""The terminal view under a real pseudo-terminal, of a simulated run."""

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
from tests.watch.screen.virtual_terminal import VirtualTerminal, attributes

_SCRIPT = str(Path(__file__).parent / "simulated_screen.py")
UTF8 = {"LC_ALL": "C.UTF-8", "NO_COLOR": None}


@contextlib.contextmanager
def showing(
    folder: Path,
    *words: str,
    ranks: int = 8,
    rows: int = 24,
    columns: int = 80,
    env: dict[str, str | None] | None = None,
) -> Iterator[VirtualTerminal]:
    command = (sys.executable, _SCRIPT, str(ranks), "30", str(folder), *words)
    with terminal(words=command, env={**UTF8, **(env or {})}, size=(rows, columns)) as job:
        yield VirtualTerminal(job, rows, columns)


def test_the_view_and_its_keys(tmp_path: Path) -> None:
    with showing(tmp_path) as term:
        before = attributes(term)
        text = term.until(r"100%\|bar")  # the log comes last
        assert attributes(term) != before
        assert term.aside
        assert not term.cursor
        head, progress = text.splitlines()[:2]
        assert "train-simulated" in head
        assert "running" in head
        assert "1 node · 8 ranks · gen 1" in head
        assert "step 29/1000" in progress
        assert "loss 1.5" in progress
        assert len([line for line in text.splitlines() if " gpu " in line and "█" in line]) == 8
        assert "recovered in 0.31 s" in text
        assert "a red word" in text  # neither in red, nor did it clear the screen
        assert term.colours(3) & {"green", "brown", "cyan"}

        term.type("j")
        term.until(r"(?m)^▸.\s+1 gpu 1")
        term.until("rank 1 stdout line 199")
        term.type("\x1b[B")
        term.until("rank 2 stdout line 199")
        term.type("5")
        term.until("rank 5 stdout line 199")
        term.type("e")
        term.until("rank 5 stderr line 199")
        term.type("e\x1b[F")  # end
        term.until("the node of rank 7 does not answer")
        term.type("\x1b[1~")  # home
        term.until("rank 0 stdout line 199")

        term.type("f")
        text = term.until("rank 0 stdout line 187")  # more of it than before
        assert "rank 0 stdout line 199" in text
        assert not any(" gpu 3 " in line for line in text.splitlines())
        term.type("\x1b[5~")
        term.until("scrolled back 20 lines")
        term.type("f")

        term.type("s")
        text = term.until("frame 16 of 0")
        assert "nothing is wrong" in text
        term.type("\x1b[6~")
        term.until("frame 3 of 1")
        term.type("\x1b")  # alone: closes an overlay
        term.until(lambda text: "── stacks" not in text)
        term.type("?")
        term.until("select a rank by its number")
        term.type("q")
        term.until("rank 0 stdout line 199")
        term.type("g")
        term.until("● healthy")
        term.type("\t")
        term.until(r"(?m)^▸.\s+0 gpu 0")

        term.type("\x1b[200~xy\x1b[201~x")  # pasted text is not typed
        term.until("stop the run\\?  y")
        term.type("n")
        term.until(lambda text: "stop the run" not in text)
        assert not (tmp_path / "actions").exists()
        term.type("xy")
        term.until("stopping the run")
        until((tmp_path / "actions").exists, 30)
        assert (tmp_path / "actions").read_text() == "stop\n"

        term.type("q")
        assert term.job.wait(60) == 0
        assert attributes(term) == before
        assert term.cursor
        assert not term.aside
        assert not term.afterwards.strip()


def test_other_sizes(tmp_path: Path) -> None:
    with showing(tmp_path, ranks=512) as term:
        term.until(r"(?m)^▸.\s+0 node0")
        term.until(r"ranks 0-\d+ of 512")
        term.resize(40, 120)
        text = term.until("── loss ")
        assert "⠒" in text or "⠉" in text
        term.type("\x1b[F")
        term.until(r"(?m)^▸.\s+511 node63")
        term.type("300")
        term.until(r"(?m)^▸.\s+300 ")
        term.until("rank 300 stdout line 199")
        term.resize(10, 40)
        text = term.until(lambda text: len(text.splitlines()) == 10 and "? help" in text.splitlines()[-1])
        assert "train-simulated" in text
        assert "300" in text
        for rows, columns in ((5, 20), (1, 1), (2, 7), (3, 200)):
            term.resize(rows, columns)
            term.type("\x1b[A?q")
        term.resize(24, 80)
        term.until(r"(?m)^▸.\s+29\d node37")


def test_without_colours_and_without_unicode(tmp_path: Path) -> None:
    with showing(tmp_path, env={"NO_COLOR": "1", "LC_ALL": "C"}) as term:
        text = term.until(r"100%\|bar")
        assert text.isascii()
        assert all(term.colours(row) == {"default"} for row in range(24))
        assert "####" in text


def test_the_end_of_the_run(tmp_path: Path) -> None:
    with showing(tmp_path) as term:
        term.until("running")
        (tmp_path / "over").touch()
        text = term.until("the run has ended, exit code 0; q leaves")
        assert "done" in text
        term.type("x")
        term.until("the run has ended")
        assert not (tmp_path / "actions").exists()
        term.type("q")
        assert term.job.wait(60) == 0


def test_below_a_run_it_goes_with_the_run_and_ctrl_c_asks(tmp_path: Path) -> None:
    with showing(tmp_path, "held") as term:
        term.until("running")
        term.type("\x03")
        term.until("stop the run.*Ctrl-C again")
        term.type("n\x03y")  # as in a terminal without a view: it is not `phalanx stop`
        actions = tmp_path / "actions"
        until(lambda: actions.exists() and actions.read_text() == "interrupt\n", 30)
        term.until("stopping the run; Ctrl-C: kill")
        term.type("\x03")
        until(lambda: actions.read_text() == "interrupt\nend now\n", 30)
        (tmp_path / "over").touch()
        term.until("the run has ended")
        assert term.job.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_terminal_is_as_it_was_after(number: signal.Signals, tmp_path: Path) -> None:
    with showing(tmp_path) as term:
        before = attributes(term)
        term.until("running")
        term.job.signal(number)
        assert term.job.wait(60) == 0
        assert attributes(term) == before
        assert term.cursor
        assert not term.aside


def test_a_debugger_has_the_terminal_for_a_while(tmp_path: Path) -> None:
    with showing(tmp_path) as term:
        before = attributes(term)
        term.until("running")
        term.type("3d")
        term.job.wait_for("(Pdb) of")
        assert not term.aside
        group = os.tcgetpgrp(term.job._keys)
        assert group != os.getpgid(term.job.pid)
        term.type("hello\r")
        term.job.wait_for("typed hello")
        term.job.wait_for("press Enter")  # it failed: its output stays until then
        assert os.tcgetpgrp(term.job._keys) == os.getpgid(term.job.pid)
        term.type("\r")
        term.until(r"(?m)^▸.\s+3 gpu 3")
        assert term.aside
        assert (tmp_path / "actions").read_text() == "debugger 3\n"
        term.type("q")
        assert term.job.wait(60) == 0
        assert attributes(term) == before


def test_ctrl_z_and_fg(tmp_path: Path) -> None:
    with terminal(words=("bash", "--norc", "--noprofile", "-i"), env={**UTF8, "PS1": "$ "}) as job:
        term = VirtualTerminal(job)
        term.until(r"\$")
        term.type(f"{sys.executable} {_SCRIPT} 8 30 {tmp_path}\r")
        term.until("train-simulated  running")
        term.type("\x1a")
        job.wait_for("Stopped")
        until(lambda: not term.aside, 30)
        assert term.cursor
        term.type("echo in the shell\r")
        job.wait_for("in the shell", count=2)
        term.type("fg\r")
        until(lambda: term.aside, 30)
        term.until("train-simulated  running")
        term.type("\x1a")
        job.wait_for("Stopped", count=2)
        term.type("fg\r")
        until(lambda: term.aside, 30)
        raw = attributes(term)
        os.kill(descendants(job.pid)[0], signal.SIGSTOP)  # it cannot leave the terminal as it was, but comes back
        job.wait_for("Stopped", count=3)
        until(lambda: attributes(term) != raw, 30)
        term.type("fg\r")
        until(lambda: attributes(term) == raw, 30)
        term.type("q")
        until(lambda: os.tcgetpgrp(job._keys) == os.getpgid(job.pid), 30)  # what is typed before is lost
        term.type("echo left with $?\r")
        job.wait_for("left with 0")
        term.type("exit\r")
        job.wait(60)


def test_the_window_is_closed(tmp_path: Path) -> None:
    with showing(tmp_path) as term:
        term.until("running")
        term.job.hang_up()
        assert term.job.process.wait(60) == 0


def test_it_is_ended_while_a_debugger_has_the_terminal(tmp_path: Path) -> None:
    with showing(tmp_path) as term:
        before = attributes(term)
        term.until("running")
        term.type("d")
        term.job.wait_for("(Pdb) of")
        debugger = descendants(term.job.pid)
        term.job.signal(signal.SIGTERM)
        assert term.job.wait(60) == 0
        assert not any(map(alive, debugger))
        assert attributes(term) == before
        assert not term.aside


def test_a_terminal_that_takes_nothing_holds_up_nothing(tmp_path: Path) -> None:
    """A connection that is stuck: the user can still leave with q."""
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
        for key in b"jjjjq":  # each its own frame
            time.sleep(0.1)
            os.write(screen, bytes([key]))
        assert process.wait(60) == 0
    finally:
        os.close(tty)
        os.close(screen)
