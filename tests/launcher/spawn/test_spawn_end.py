"""phalanx.spawn: whatever ends the caller or its fork server, no process is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.kit.cli import PYTHON, Handle, alive, start, terminal, until

NO_TORCH = "import sys; sys.modules['torch'] = None\n"

SLEEPERS = """
import os, signal, subprocess, sys, time
sys.modules["torch"] = None
from phalanx.launcher.spawn.spawn import spawn

def wait():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if {stubborn!r}:
        signal.signal(signal.SIGTERM, lambda *_: open({stubborn!r}, "w").close())
    print("ready", os.getpid(), child.pid)
    while True:
        time.sleep(1000)

if __name__ == "__main__":
    spawn(wait, 2, fresh={fresh}, join=False)
"""


def ready(job: Handle) -> list[int]:
    found = job.wait_for(re.compile(r"ready (\d+) (\d+)"), 2)
    return [int(number) for match in found for number in match.groups()]


@pytest.fixture(params=[False, True], ids=["forked", "fresh"])
def sleepers(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "sleepers.py"
    path.write_text(SLEEPERS.format(fresh=request.param, stubborn=None))
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_caller_that_is_killed_leaves_nothing(sleepers: str, number: signal.Signals) -> None:
    job = start(words=(*PYTHON, sleepers))
    pids = ready(job)
    assert len(pids) == 4
    job.signal(number)
    assert job.wait() == -number
    until(lambda: not any(map(alive, pids)), 10, "the end of ranks and what they had started")


def test_a_fork_server_that_is_killed_takes_the_ranks_along(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        f"{NO_TORCH}import os, time\nfrom phalanx.launcher.spawn.spawn import spawn\n"
        "def fn():\n    print('ready', os.getpid(), os.getppid())\n    time.sleep(1000)\n"
        "spawn(fn, 2, join=False)\n"
    )
    job = start(words=(*PYTHON, str(path)))
    one, server, other, _ = ready(job)
    os.kill(server, signal.SIGKILL)
    assert job.wait() == 1
    assert "its fork server was killed" in job.err
    until(lambda: not any(map(alive, (one, other))), 10, "the end of the ranks")


def test_ctrl_c(sleepers: str) -> None:
    job = terminal(words=(*PYTHON, sleepers))
    pids = ready(job)
    job.send(b"\x03")
    assert job.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in job.out
    assert not any(map(alive, pids))


def test_ctrl_c_twice(tmp_path: Path) -> None:
    """Processes that do not end on request are not waited for."""
    path = tmp_path / "script.py"
    began = tmp_path / "ready"
    path.write_text(SLEEPERS.format(fresh=False, stubborn=str(began)))
    job = terminal(words=(*PYTHON, str(path)))
    pids = ready(job)
    job.send(b"\x03")
    until(began.exists, 20, "the first signal to arrive")
    job.send(b"\x03")
    assert job.wait() == -signal.SIGINT
    until(lambda: not any(map(alive, pids)), 10, "the end of ranks and what they had started")
