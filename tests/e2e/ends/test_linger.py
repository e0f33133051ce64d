"""Processes that ranks leave running after a run: named, given time, ended, or left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.jobs import PLAIN, together
from tests.e2e.places import READY, pids, script
from tests.kit import proc
from tests.kit.cli import phalanx, start, terminal, until
from tests.kit.handle import Handle
from tests.kit.lab import Lab, Sshd
from tests.kit.proc import alive, read

LEFT = re.compile(r"left 1 (\d+)")
WAYS = [
    pytest.param((), id="cold"),
    pytest.param(("--fresh",), id="fresh"),
    pytest.param((), id="warm", marks=pytest.mark.warmed),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Start workers in each way."""
    return request.param  # type: ignore[no-any-return]


def begin(folder: Path, *options: str, how: str = "session", args: tuple[str, ...] = ()) -> tuple[Handle, int]:
    """Start a run that leaves a process running; return it and the pid of that process."""
    job = start("run", "-g", "2", "--cpu", *options, script("left.py"), how, str(folder), *args)
    return job, int(job.wait_for(LEFT)[0][1])


def go(folder: Path) -> None:
    (folder / "go").touch()


def test_a_lingering_process_is_named_and_may_finish(way: tuple[str, ...], tmp_path: Path) -> None:
    job, pid = begin(tmp_path, *way)
    job.wait_for(
        f"phalanx: waiting up to 120 s (--linger) for a process that is still running (pid {pid} of rank 1: sh -c"
    )
    go(tmp_path)
    assert job.wait() == 0
    assert (tmp_path / "finished").exists()
    assert "[1] finished" in job.out
    assert "ending" not in job.err


@pytest.mark.smoke
@pytest.mark.warmed
@pytest.mark.parametrize("how", ["group", "daemon"])
def test_however_it_was_started(how: str, tmp_path: Path) -> None:
    job, pid = begin(tmp_path, how=how)
    job.wait_for(f"(pid {pid}")
    go(tmp_path)
    assert job.wait() == 0
    assert (tmp_path / "finished").exists()


@pytest.mark.warmed
@pytest.mark.parametrize("args", [(), ("--ignore-term",)])
def test_its_time_is_limited(args: tuple[str, ...], tmp_path: Path) -> None:
    job, pid = begin(tmp_path, "--linger", "1s", args=args)
    assert job.wait() == 0
    assert not alive(pid)
    assert "ending a process that is still running" in job.err
    assert "after 1 s (--linger)" in job.err


@pytest.mark.warmed
def test_without_any_time_it_is_ended_and_named(tmp_path: Path) -> None:
    job, pid = begin(tmp_path, "--linger", "0")
    assert job.wait() == 0
    assert not alive(pid)
    assert f"ending a process that is still running (pid {pid} of rank 1" in job.err


def test_a_lingering_process_can_be_left_running(way: tuple[str, ...], tmp_path: Path) -> None:
    job, pid = begin(tmp_path, *way, "--linger", "forever")
    assert job.wait() == 0
    assert f"leaving a process that is still running (pid {pid} of rank 1" in job.err
    folder = re.search(r"output in (\S+)", job.err)
    assert folder is not None
    assert alive(pid)
    go(tmp_path)
    until(lambda: not alive(pid), 10, "its end")
    assert (tmp_path / "finished").exists()
    log = Path(folder[1]) / "attempt_0" / "1" / "stdout.log"  # its output is still read
    until(lambda: "finished" in log.read_text(), 10, "its output")


@pytest.mark.warmed
def test_a_process_that_one_run_left_survives_the_next_run(tmp_path: Path) -> None:
    job, pid = begin(tmp_path, "--linger", "forever")
    assert job.wait() == 0
    other = start("run", "-g", "1", "--cpu", script("sleepy.py"))
    (worker,) = pids(other, READY, 1)
    process = read(worker)
    assert process is not None
    os.kill(process.parent, signal.SIGKILL)  # the fork server: its workers' processes become children of the warm one
    assert other.wait() == 137
    until(lambda: not alive(worker), 10, "the end of the worker")
    assert alive(pid)
    go(tmp_path)
    until(lambda: not alive(pid), 10, "its end")
    assert (tmp_path / "finished").exists()


@pytest.mark.smoke
@pytest.mark.warmed
def test_after_a_failure_nothing_stays(tmp_path: Path) -> None:
    job, pid = begin(tmp_path, "--linger", "forever", args=("--code", "3"))
    assert job.wait() == 3
    assert not alive(pid)
    assert "still running" not in job.err


@pytest.mark.warmed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_the_code_stays(number: signal.Signals, tmp_path: Path) -> None:
    job, pid = begin(tmp_path)
    job.wait_for("waiting up to")
    job.signal(number)
    assert job.wait() == 0
    assert not alive(pid)


@pytest.mark.warmed
def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    job = terminal("run", "-g", "2", "--cpu", script("left.py"), "session", str(tmp_path), size=(24, 200))
    pid = int(job.wait_for(LEFT)[0][1])
    job.wait_for("Ctrl-C ends it now")
    job.send(b"\x03")
    assert job.wait() == 0
    assert not alive(pid)


@pytest.mark.warmed
@pytest.mark.leaves("tmp:pymp-*", why="a rank that ends by os._exit cannot remove multiprocessing's directory")
@pytest.mark.parametrize("how", ["helper", "pipe"])
def test_helpers_are_not_waited_for(how: str, tmp_path: Path) -> None:
    done = phalanx("run", "-g", "2", "--cpu", script("left.py"), how, str(tmp_path))
    assert done.code == 0
    assert "still running" not in done.err
    assert done.seconds < 100  # not the 120 s of --linger: a DataLoader's worker looks for its parent every 5 s


def test_every_node_waits_for_its_own(lab: Lab, tmp_path: Path) -> None:
    first, second = together(lab, *PLAIN, script("left.py"), "session", str(tmp_path), ranks=(1, 1))
    pid = int(first.wait_for(LEFT)[0][1])
    first.wait_for("waiting up to 120 s (--linger) for a process that is still running")
    assert first.wait() == 0
    assert second.process.poll() is None
    assert "still running" in second.err
    go(tmp_path)
    assert second.wait() == 0
    assert (tmp_path / "finished").exists()
    assert pid


def test_node_0_keeps_no_other_node_waiting(lab: Lab, tmp_path: Path) -> None:
    first, second = together(lab, *PLAIN, script("left.py"), "session", str(tmp_path), ranks=(2, 1))
    first.wait_for("waiting up to 120 s (--linger) for a process that is still running")
    assert second.wait() == 0
    assert first.process.poll() is None
    go(tmp_path)
    assert first.wait() == 0
    assert (tmp_path / "finished").exists()


@pytest.mark.parametrize("hosts", ["node1:1,node2:1", "node2:1,node3:1"])
@pytest.mark.parametrize("patient", [True, False])
def test_a_terminal_waits_for_the_nodes_it_has_started(
    lab: Lab, ssh: Sshd, tmp_path: Path, hosts: str, patient: bool
) -> None:
    words = (*PLAIN, "--hosts", hosts, script("left.py"), "session", str(tmp_path))
    job = lab[0].start("run", *words, env=ssh.env)
    job.wait_for("waiting up to 120 s (--linger) for a process that is still running")
    assert len(lefts(lab)) == 1
    if patient:
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(5)  # a node that ends by itself is cut off after 3 s
        go(tmp_path)
    else:
        job.signal(signal.SIGINT)
    assert job.wait() == 0
    assert (tmp_path / "finished").exists() is patient
    until(lambda: not lefts(lab), 15, "its end")


def lefts(lab: Lab) -> list[int]:
    """Return the shells that were left running. Each forks, and its child is a shell until it executes `sleep`."""
    shells = {one.pid: one.parent for node in lab for one in node.living() if proc.command(one.pid).startswith("sh -c")}
    return [pid for pid, parent in shells.items() if parent not in shells]
