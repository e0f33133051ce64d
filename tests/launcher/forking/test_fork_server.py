"""A fork server, used like by the agent: real processes, one order at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import forkserver
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.forking.fork_servers import ForkServerClient


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ForkServerClient]:
    with open(tmp_path / "forkserver.log", "wb") as log:
        fork_server = fork_servers.fresh(os.environ, log=log.fileno())
    assert next_message(fork_server)["is"] == "ready"
    yield fork_server
    fork_server.send({"do": "end"})
    assert next_message(fork_server) == {"is": "ended", "left": []}
    assert fork_server.gone() == 0


def next_message(fork_server: ForkServerClient) -> dict[str, Any]:
    message = fork_server.receive()
    assert message is not None
    return message


def start(fork_server: ForkServerClient, folder: Path, **order: object) -> str:
    """Run one child to its end; return its stderr."""
    with open(os.devnull) as nothing, open(folder / "err", "wb") as err:
        fds = [nothing.fileno(), err.fileno(), err.fileno()]
        fork_server.send({"do": "start", "name": "0", "environ": {}, "exec": ["true"], **order}, fds)
    started = next_message(fork_server)
    assert (started["is"], started["name"]) == ("started", "0")
    return (folder / "err").read_text()


def test_a_child_is_started_and_its_end_is_reported(fresh: ForkServerClient, tmp_path: Path) -> None:
    start(fresh, tmp_path, exec=["sh", "-c", "exit 7"])
    ended = next_message(fresh)
    assert (ended["is"], os.waitstatus_to_exitcode(ended["status"])) == ("exited", 7)


@pytest.mark.parametrize(
    ("order", "code", "words"),
    [
        ({"cwd": "/no/such/folder"}, 70, "could not be set up: FileNotFoundError"),
        ({"cores": [4095]}, 70, "could not be set up: OSError"),
        ({"exec": ["no-such-program"]}, 127, "cannot run no-such-program"),
        ({"exec": ["/etc/passwd"]}, 126, "cannot run /etc/passwd: Permission denied"),
    ],
)
def test_a_child_that_cannot_be_set_up_becomes_nothing_else(
    fresh: ForkServerClient, tmp_path: Path, order: dict[str, object], code: int, words: str
) -> None:
    start(fresh, tmp_path, **order)
    assert os.waitstatus_to_exitcode(next_message(fresh)["status"]) == code
    assert words in (tmp_path / "err").read_text()


def test_what_a_child_left_behind_is_swept(fresh: ForkServerClient, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    start(fresh, tmp_path, exec=["sh", "-c", f"setsid sleep 600 & echo $! > {pid_file}"])
    assert next_message(fresh)["is"] == "exited"
    left = int(pid_file.read_text())
    assert os.path.exists(f"/proc/{left}")
    fresh.send({"do": "end_orphans", "id": 1})
    assert next_message(fresh) == {"is": "orphans_ended", "id": 1}
    assert not os.path.exists(f"/proc/{left}")


def test_what_a_child_left_behind_may_stay_with_its_files(tmp_path: Path) -> None:
    """Shared memory named after a live process, whether or not it is open at the moment."""
    with open(tmp_path / "forkserver.log", "wb") as log:
        fork_server = fork_servers.fresh(os.environ, log=log.fileno())
    assert next_message(fork_server)["is"] == "ready"
    pid_file = tmp_path / "pid"
    start(fork_server, tmp_path, exec=["sh", "-c", f"setsid sleep 600 & echo $! > {pid_file}"])
    dead = next_message(fork_server)["pid"]
    left = int(pid_file.read_text())
    mine, orphaned = Path(f"/dev/shm/torch_{left}_0"), Path(f"/dev/shm/torch_{dead}_0")
    mine.touch()
    orphaned.touch()
    try:
        fork_server.send({"do": "orphans", "id": 2})
        assert next_message(fork_server) == {"is": "orphans", "id": 2, "pids": [left]}
        fork_server.send({"do": "end", "leave": True})
        assert next_message(fork_server) == {"is": "ended", "left": [left]}
        assert fork_server.gone() == 0
        assert os.path.exists(f"/proc/{left}")
        assert mine.exists()
        assert not orphaned.exists()
    finally:
        os.kill(left, signal.SIGKILL)
        mine.unlink()


def test_nobody_is_left_when_a_child_has_left_nothing(fresh: ForkServerClient, tmp_path: Path) -> None:
    start(fresh, tmp_path)
    assert next_message(fresh)["is"] == "exited"
    fresh.send({"do": "orphans", "id": 3})
    assert next_message(fresh) == {"is": "orphans", "id": 3, "pids": []}


def test_a_hook_that_fails_does_not_let_the_script_run(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("print('this must not run')")
    hook = os.path.join(os.path.dirname(forkserver.__file__), "hook")
    environ = {**os.environ, "PYTHONPATH": hook, "PHALANX_FORKSERVER": f"999:{os.getpid()}"}
    done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True)
    assert done.returncode == 70
    assert done.stdout == ""
    assert "Bad file descriptor" in done.stderr
