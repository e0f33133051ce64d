"""Processes that have their modules already: one process has imported them, and forks another for every command.

    @pytest.mark.imported
    def test_…:
        result = python("train.py", "--lr", "0.1")    # as `cli.python`, seconds earlier: torch is there
        job = start("-c", "import torch; …")          # as `cli.start`

    result = phalanx("ps")                            # of tests.kit.cli, in any test: phalanx is there

For tests that do not depend on how an interpreter starts: nothing else about these processes is special.
import_server.py is the program of the process that has imported them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kit.cli import Env, Handle, Result


SERVER = str(Path(__file__).with_name("import_server.py"))
TORCH, COMMANDS = "torch", "commands"  # what is imported: torch for scripts, the command line of phalanx
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_")  # an interpreter reads these when it starts


def start(*words: str, env: Env | None = None, cwd: str | None = None, init: int = 0) -> Handle:
    """Start `python -u WORDS` in a new session; standard input is empty.

    `init` is the pid of the init of a lab's node: the interpreter starts in all its namespaces.
    """
    from tests.kit.cli import environment

    assert in_use(), "only a test that is marked `imported` has it"
    return _fork(TORCH, words, environment(env), cwd, init)


def command(words: Sequence[str], env: dict[str, str], cwd: str | None, init: int = 0) -> Handle | None:
    """Start `python -m phalanx WORDS` in the same way. None: that needs a new interpreter."""
    from tests.kit import state

    # Without pytest there is no plugin that ends it. A daemon must not become its child.
    if not _sockets or state.daemons_allowed():
        return None
    parent = _parent(COMMANDS)
    if _at_start(env) != _at_start(parent.env):
        return None
    state.beside.add(parent.pid)
    return _fork(COMMANDS, ("-m", "phalanx", *words), env, cwd, init)


def _at_start(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}


def _fork(what: str, words: Sequence[str], env: dict[str, str], cwd: str | None, init: int = 0) -> Handle:
    from tests.kit.handle import Handle

    class Forked(Handle):
        def _ending(self) -> int:
            return os.dup(process.report)

    out, out_end = os.pipe2(os.O_CLOEXEC)
    err, err_end = os.pipe2(os.O_CLOEXEC)
    order = {"words": words, "env": env, "cwd": os.path.abspath(cwd or "."), "init": init}
    process = _shared[what].fork(order, out_end, err_end)
    return Forked(process, {out: "out", err: "err"})  # type: ignore[arg-type]


def python(*words: str, env: Env | None = None, cwd: str | None = None, timeout: float = 60) -> Result:
    """Run it to its end."""
    from tests.kit.cli import Result

    with start(*words, env=env, cwd=cwd) as job:
        code = job.wait(timeout)
        assert job.drained(), f"{' '.join(words)}: ended, but its output is held open"
        raw = job.bytes("out"), job.bytes("err")
        return Result(code, job.out, job.err, (job.ended or job.started) - job.started, *raw)


def claim() -> None:
    """Make the sockets before any test: in a test they would look like leaked descriptors."""
    for what in (TORCH, COMMANDS):
        _sockets[what] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def use() -> Iterator[None]:
    """Use the process with torch in a test: its leftover descendants belong to the test."""
    from tests.kit import state

    pid = _parent(TORCH).pid
    state.beside.add(pid)
    try:
        yield
    finally:
        state.beside.discard(pid)


@contextlib.contextmanager
def commands() -> Iterator[None]:
    """Enter this around every test: only commands that the test starts itself can be its leaks."""
    from tests.kit import state

    parent = _shared.get(COMMANDS)
    if parent is not None and parent.has_children():
        state.beside.add(parent.pid)
    try:
        yield
    finally:
        if COMMANDS in _shared:
            state.beside.discard(_shared[COMMANDS].pid)


def in_use() -> bool:
    """Return whether this test has torch imported."""
    from tests.kit import state

    return TORCH in _shared and _shared[TORCH].pid in state.beside


def _parent(what: str) -> _Parent:
    from tests.kit import proc

    if what not in _shared or not proc.alive(_shared[what].pid):
        _shared[what] = _Parent(what)
    return _shared[what]


def shut_down() -> None:
    """End these processes: there are no more tests."""
    from tests.kit import proc

    while _shared:
        pid = _shared.popitem()[1].pid
        if SERVER in proc.command(pid):  # its pid may belong to another process by now
            os.kill(pid, signal.SIGKILL)  # at once: it may still import
    while _sockets:
        for sock in _sockets.popitem()[1]:
            sock.close()


class _Parent:
    """The process that has the modules, as seen from here."""

    def __init__(self, what: str) -> None:
        from tests.kit import state
        from tests.kit.cli import environment

        self._sock, theirs = _sockets[what]
        words = (sys.executable, *(["-u"] if what == TORCH else []), SERVER, what, str(theirs.fileno()))
        self.env = environment()
        with state.orphans_left_alone():
            subprocess.run(
                ("sh", "-c", '"$@" &', "sh", *words),  # not our child: tests check those
                env={**self.env, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
        self.pid = int(self._sock.recv(64))

    def has_children(self) -> bool:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
            return bool(file.read())
        return False

    def fork(self, order: dict[str, Any], out: int, err: int) -> _Process:
        report, report_end = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        fds = [nothing, out, err, report_end]
        try:
            socket.send_fds(self._sock, [json.dumps(order).encode()], fds)
        finally:
            for fd in fds:
                os.close(fd)
        return _Process(int(self._sock.recv(64)), report, order["words"])


class _Process:
    """The part of `Popen` that a handle needs, for a process that is another's child."""

    stdin = None

    def __init__(self, pid: int, report: int, words: list[str]) -> None:
        self.pid = pid
        self.report = report  # receives the exit code
        self.args = words
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return (
            self.wait() if self.returncode is None and select.select([self.report], [], [], 0)[0] else self.returncode
        )

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(os.read(self.report, 16) or -signal.SIGKILL)
            os.close(self.report)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_sockets: dict[str, tuple[socket.socket, socket.socket]] = {}
_shared: dict[str, _Parent] = {}
