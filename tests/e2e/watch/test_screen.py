"""`phalanx run --screen` and `phalanx watch`, of real runs in real terminals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.cli import PHALANX, alive, descendants, start, terminal, until, warm_environment
from tests.kit.proc import command
from tests.watch.screen.virtual_terminal import VirtualTerminal, attributes

pytestmark = pytest.mark.xdist_group("screen")  # they share a warm fork server
places: dict[str, str | None] = {}

SCRIPT = """
import os, sys, time
rank, folder, then = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]

def wait(name):
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.02)

print(f"rank {rank} is here; input {sys.stdin.read()!r}, a terminal: {sys.stdout.isatty()}", flush=True)
wait("go")
print(f"rank {rank} continues", flush=True)
if then == "break" and rank == 1:
    breakpoint()
    raise ValueError("no good")
wait("end")
"""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    with warm_environment(LC_ALL="C.UTF-8") as env:
        places.update(env)
        yield
        places.clear()


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "quiet.py"
    script.write_text(SCRIPT)
    return ("run", "--screen", "-g", "2", "--cpu", str(script), str(tmp_path))


def screen_of(pid: int) -> int:
    """Return the process of a run that draws the screen."""
    found: list[int] = []
    until(lambda: bool(found.extend(p for p in descendants(pid) if "--held" in command(p)) or found), 30)
    return found[0]


def here(term: VirtualTerminal) -> None:
    """Wait until ranks have begun, and their output is in the tail."""
    term.until(r"rank 0 is here; input '', a terminal: False")


def test_a_screen_that_is_killed(words: tuple[str, ...], tmp_path: Path) -> None:
    with terminal(*words, "-", env=places) as job:
        term = VirtualTerminal(job)
        before = attributes(term)
        here(term)
        assert term.aside
        assert attributes(term) != before
        os.kill(screen_of(job.pid), signal.SIGKILL)
        job.wait_for("the screen ended")
        assert not term.aside
        assert term.cursor
        assert attributes(term) == before
        (tmp_path / "go").touch()
        job.wait_for("rank 1 continues")
        (tmp_path / "end").touch()
        assert job.wait() == 0
        assert "is here" not in term.afterwards  # that was earlier, and is in the logs


def test_a_breakpoint_and_the_last_messages(words: tuple[str, ...], tmp_path: Path) -> None:
    with terminal(*words, "break", env=places) as job:
        term = VirtualTerminal(job)
        before = attributes(term)
        here(term)
        (tmp_path / "go").touch()
        term.until("rank 1 waits at a breakpoint")
        assert term.aside
        term.type("1d")
        job.wait_for("(Pdb)")
        assert not term.aside
        term.type("\x03")  # the interrupt is not for the run
        job.wait_for("KeyboardInterrupt")
        job.wait_for("(Pdb)", 2)
        term.type("p 6 * 7\r")
        job.wait_for("\n42")
        term.type("c\r")
        assert job.wait() == 1
        assert "ValueError: no good" in term.afterwards
        assert attributes(term) == before
        assert term.cursor
        assert not term.aside


def test_who_leaves_and_who_stops_it_from_elsewhere(words: tuple[str, ...], tmp_path: Path) -> None:
    with terminal(*words, "-", env=places) as job:
        term = VirtualTerminal(job)
        before = attributes(term)
        here(term)
        term.type("q")
        until(lambda: not term.aside, 30)
        with terminal("watch", env=places) as other, start("watch", env=places) as lines:
            there = VirtualTerminal(other)
            here(there)
            assert attributes(term) == before
            (tmp_path / "go").touch()
            job.wait_for("rank 1 continues")
            there.until("rank 0 continues")
            there.type("x")
            there.until("stop the run")
            assert job.process.poll() is None
            there.type("y")
            assert job.wait() == 143
            there.until("the run has ended")
            there.type("q")
            assert other.wait() == 0
            assert lines.wait() == 143
            assert "stopped by SIGTERM" in lines.out.splitlines()[-1]
            assert "\x1b" not in lines.out


def test_ctrl_z_and_a_run_that_is_killed(words: tuple[str, ...], tmp_path: Path) -> None:
    env = {**places, "PS1": "$ "}
    with terminal(words=("bash", "--norc", "--noprofile", "-i"), env=env) as job:
        term = VirtualTerminal(job)
        term.until(r"\$")
        term.type(f"{' '.join(PHALANX)} {' '.join(words)} -\r")
        here(term)
        run = next(pid for pid in descendants(job.pid) if "--screen" in command(pid))
        drawing = screen_of(run)
        term.type("\x1a")
        job.wait_for("Stopped")
        assert not term.aside
        term.type("fg\r")
        until(lambda: term.aside, 30)
        here(term)
        os.kill(run, signal.SIGSTOP)  # the screen continues, but does not draw over the shell
        job.wait_for("Stopped", count=2)
        until(lambda: not term.aside, 30)
        term.type("fg\r")
        until(lambda: term.aside, 30)
        os.kill(run, signal.SIGKILL)
        job.wait_for("Killed")
        until(lambda: not alive(drawing), 30)
        until(lambda: not term.aside, 30)
        assert term.cursor
        term.type("stty -a; exit\r")
        job.wait_for(" icanon")
        job.wait()


@pytest.mark.smoke
def test_without_a_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("go", "end"):
        (tmp_path / name).touch()
    with start(*words, "-", env=places) as job:
        assert job.wait() == 0
        assert "--screen ignored: it needs a terminal" in job.err
        assert "[1] rank 1 continues" in job.out
    with terminal("watch", env={**places, "TERM": "dumb"}) as job:
        assert job.wait() == 0
        assert "succeeded" in job.out
        assert "\x1b" not in job.out
    with terminal("watch", env=places) as job:
        term = VirtualTerminal(job)
        term.until("the run has ended, exit code 0; q leaves")
        term.until("rank 0 continues")
        term.type("q")
        assert job.wait() == 0
