"""Every way to end a run: afterwards no process of it exists. The kit's fixture also checks that, after each test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.places import CHILD, READY, pids, script
from tests.kit.cli import PHALANX, phalanx, start, terminal, until
from tests.kit.handle import Handle
from tests.kit.proc import alive, every, read

pytestmark = [
    pytest.mark.leaves("tmp:pymp-*", why="a killed worker cannot remove multiprocessing's directory"),
    pytest.mark.xdist_group("endings"),
]
WAYS = [
    pytest.param((), id="cold"),
    pytest.param(("--fresh",), id="fresh"),
    pytest.param((), id="warm", marks=pytest.mark.warmed),
]


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Start workers in each way."""
    return request.param  # type: ignore[no-any-return]


def sleepers(options: tuple[str, ...], *args: str, ranks: int = 2) -> tuple[Handle, list[int]]:
    """Start a run whose workers sleep; return it and their pids, with --children including their child processes."""
    job = start("run", "-g", str(ranks), "--cpu", *options, script("sleepy.py"), *args)
    found = pids(job, READY, ranks)
    if "--children" in args:
        found += pids(job, CHILD, 3 * ranks)
    return job, found


def children(pid: int) -> list[int]:
    return [process.pid for process in every() if process.parent == pid and not process.dead]


def fork_server(workers: list[int]) -> int:
    """Return the parent of the workers. The agent may have other children for a moment, such as git."""
    worker = read(workers[0])
    assert worker is not None
    return worker.parent


def all_gone(found: list[int], timeout: float = 5) -> None:
    until(lambda: not any(map(alive, found)), timeout, f"the end of {found}")


@pytest.mark.smoke
@pytest.mark.warmed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_the_agent_ends_the_run(number: signal.Signals) -> None:
    job, found = sleepers(())
    job.signal(number)
    assert job.wait() == 128 + number
    assert not any(map(alive, found))


def test_a_worker_with_children(options: tuple[str, ...]) -> None:
    job, found = sleepers(options, "--children")
    assert len(found) == 8
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert not any(map(alive, found))


def test_a_worker_that_ignores_sigterm_is_killed_when_its_time_is_up(options: tuple[str, ...]) -> None:
    job, found = sleepers((*options, "--shutdown-timeout", "1"), "--ignore-term")
    begin = time.monotonic()
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert time.monotonic() - begin < 25  # the default is 30 s
    assert not any(map(alive, found))
    assert "has not stopped" in job.err


def test_the_agent_is_killed(options: tuple[str, ...]) -> None:
    job, found = sleepers(options, "--children", "--ignore-term")
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    all_gone(found)


def test_the_agent_is_killed_while_torch_is_imported() -> None:
    job = start("run", "-g", "2", "--cpu", script("sleepy.py"))
    started = until(lambda: children(job.pid), 10, "the fork server")
    job.signal(signal.SIGKILL)
    job.wait()
    all_gone(list(started))


def test_ctrl_c_while_torch_is_imported() -> None:
    job = terminal("run", "-g", "2", "--cpu", script("sleepy.py"))
    started = until(lambda: children(job.pid), 10, "the fork server")
    job.wait_for("2 ranks")
    job.send(b"\x03")
    assert job.wait() == 130
    all_gone(list(started))


@pytest.mark.parametrize("way", ["cold", "fresh"])
def test_the_fork_server_is_killed(way: str) -> None:
    job, found = sleepers(("--fresh",) if way == "fresh" else (), "--children", "--ignore-term")
    os.kill(fork_server(found), signal.SIGKILL)
    assert job.wait() == 137
    assert "fork server" in job.err
    assert not any(map(alive, found))


@pytest.mark.warmed
def test_the_fork_server_of_a_run_that_came_from_a_warm_one_is_killed() -> None:
    job, found = sleepers((), "--children", "--ignore-term")
    os.kill(fork_server(found), signal.SIGKILL)
    assert job.wait() == 137
    all_gone(found)


@pytest.mark.smoke
@pytest.mark.warmed
def test_ctrl_c_once_is_graceful() -> None:
    job = terminal("run", "-g", "2", "--cpu", script("sleepy.py"))
    found = pids(job, READY, 2)
    job.send(b"\x03")
    assert job.wait() == 130
    assert "phalanx: stopped by Ctrl-C" in job.out
    assert "KeyboardInterrupt" not in job.out
    logs = sorted(Path(os.environ["PHALANX_HOME"], "runs").glob("sleepy-*/attempt_0/*/stdout.log"))
    assert sum("KeyboardInterrupt" in log.read_text() for log in logs) >= 2
    all_gone(found)


@pytest.mark.smoke
@pytest.mark.warmed
def test_ctrl_c_twice_is_now() -> None:
    job = terminal("run", "-g", "2", "--cpu", script("sleepy.py"), "--ignore-term")
    found = pids(job, READY, 2)
    begin = time.monotonic()
    job.send(b"\x03")
    job.wait_for("again ends at once")
    job.send(b"\x03")
    assert job.wait() == 130
    assert time.monotonic() - begin < 25  # the grace is 30 s
    all_gone(found)


@pytest.mark.smoke
@pytest.mark.warmed
def test_the_window_is_closed() -> None:
    job = terminal("run", "-g", "2", "--cpu", script("sleepy.py"), "--children")
    found = pids(job, READY, 2) + pids(job, CHILD, 6)
    job.hang_up()
    assert job.wait() == 128 + signal.SIGHUP
    all_gone(found)


def test_nohup_is_honoured() -> None:
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    job = start(words=(*ignoring, *PHALANX, "run", "-g", "2", "--cpu", script("sleepy.py")))
    found = pids(job, READY, 2)
    job.signal(signal.SIGHUP)
    assert phalanx("stop").code == 0
    assert job.wait() == 143  # the code is that of the first signal that was heeded: else 129
    assert not any(map(alive, found))


@pytest.mark.warmed
def test_a_stopped_worker_is_ended_too() -> None:
    job, found = sleepers(())
    os.kill(found[1], signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert not any(map(alive, found))


@pytest.mark.smoke
@pytest.mark.warmed
def test_stop_ends_a_run_and_ps_lists_it() -> None:
    job, found = sleepers(("--rdzv-id", "mine", "--master-port", "0"))
    listed = phalanx("ps")
    assert "mine" in listed.out
    assert "running" in listed.out
    stopped = phalanx("stop", "mine")
    assert (stopped.code, stopped.out) == (0, "mine ended\n")
    assert job.wait() == 143
    assert not any(map(alive, found))
    assert "mine" not in phalanx("ps").out
    assert "stopped by SIGTERM" in phalanx("ps", "--all").out
    again = phalanx("stop", "mine")
    assert again.code == 2
    assert "no run called mine" in again.err


@pytest.mark.smoke
@pytest.mark.warmed
def test_stop_now_does_not_wait_for_a_worker_that_ignores_it() -> None:
    job, found = sleepers((), "--ignore-term")
    begin = time.monotonic()
    assert phalanx("stop", "--now").code == 0
    assert time.monotonic() - begin < 25  # the default is 30 s
    assert job.wait() == 143
    assert not any(map(alive, found))


@pytest.mark.smoke
@pytest.mark.warmed
def test_a_killed_agent_is_remembered_as_killed() -> None:
    job, found = sleepers(())
    job.signal(signal.SIGKILL)
    job.wait()
    all_gone(found)
    assert "killed" in phalanx("ps", "--all").out
    assert phalanx("ps").out == "nothing is running\n"
