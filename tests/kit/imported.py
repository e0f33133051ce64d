"""Plain Python with torch imported already: one process has it, and forks another for every script.

    @pytest.mark.imported
    def test_…:
        result = python("train.py", "--lr", "0.1")    # as `cli.python`, seconds earlier
        job = start("-c", "import torch; …")          # as `cli.start`

For tests that do not ask how an interpreter begins: nothing else about these processes is special.
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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this file is also the program of that process
    from tests.kit.cli import Env, Handle, Result


def start(*words: str, env: Env | None = None, cwd: str | None = None) -> Handle:
    """Start `python -u WORDS` in its own session; standard input is empty."""
    from tests.kit.cli import environment
    from tests.kit.handle import Handle

    class Forked(Handle):
        def _ending(self) -> int:
            return os.dup(process.report)

    assert in_use(), "only a test that is marked `imported` has it"
    out, out_end = os.pipe2(os.O_CLOEXEC)
    err, err_end = os.pipe2(os.O_CLOEXEC)
    order = {"words": words, "env": environment(env), "cwd": cwd or os.getcwd()}
    process = _shared[0].fork(order, out_end, err_end)
    return Forked(process, {out: "out", err: "err"})  # type: ignore[arg-type]


def python(*words: str, env: Env | None = None, cwd: str | None = None, timeout: float = 60) -> Result:
    """Run it to its end."""
    from tests.kit.cli import Result

    with start(*words, env=env, cwd=cwd) as job:
        code = job.wait(timeout)
        assert job.drained(2), f"{' '.join(words)}: ended, but its output is held open"
        raw = job.bytes("out"), job.bytes("err")
        return Result(code, job.out, job.err, (job.ended or job.started) - job.started, *raw)


@contextlib.contextmanager
def use() -> Iterator[None]:
    """Use the process in a test: its leftover descendants belong to the test."""
    from tests.kit import proc, state

    if _shared and not proc.alive(_shared[0].pid):
        shut_down()
    if not _shared:
        _shared.append(_Parent())
    state.beside.add(_shared[0].pid)
    try:
        yield
    finally:
        state.beside.discard(_shared[0].pid)


def in_use() -> bool:
    from tests.kit import state

    return bool(_shared) and _shared[0].pid in state.beside


def shut_down() -> None:
    while _shared:
        _shared.pop().close()


class _Parent:
    """The process that has imported torch."""

    def __init__(self) -> None:
        from tests.kit import state
        from tests.kit.cli import environment

        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = (sys.executable, "-u", __file__, str(theirs.fileno()))
        with theirs, state.orphans_left_alone():
            subprocess.run(
                ("sh", "-c", '"$@" &', "sh", *words),  # not our child: tests check those
                env=environment({"OMP_NUM_THREADS": "1"}),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
            )
        self.pid = int(self._sock.recv(64))

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

    def close(self) -> None:
        self._sock.close()


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

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(os.read(self.report, 16) or -signal.SIGKILL)
            os.close(self.report)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_shared: list[_Parent] = []


# -- the other side


def _serve(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Serve until there are no more requests. Returns only in a child: its request, and its standard streams."""
    children: dict[int, int] = {}  # pid -> where to report its exit code
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([sock, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            for pid, code in _ended():
                if pid in children:
                    os.write(children[pid], str(code).encode())
                    os.close(children.pop(pid))
        if sock in ready:
            data, fds, _, _ = socket.recv_fds(sock, 1 << 18, 4)
            if not data:
                sys.exit()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for fd in (sock.detach(), woken, wake, fds.pop(), *children.values()):
                    os.close(fd)
                return json.loads(data), fds
            children[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            sock.send(str(pid).encode())


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _become(order: dict[str, Any], fds: list[int]) -> Any:
    """Do everything that precedes the first line of the script. Call the result to run it."""
    import functools
    import tempfile

    from phalanx.forkserver.child import main_module, setup

    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for name in signal.Signals:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # like Python
        signal.signal(name, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    setup._reseed()
    script, *args = order["words"]
    if script != "-c":
        return main_module.prepare({"main": ("script", script), "args": args})
    main = main_module._fresh_main()
    text, *args = args
    sys.argv[:] = ["-c", *args]
    sys.path.insert(0, "")
    return functools.partial(exec, compile(text, "<string>", "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    import ctypes
    import gc
    import importlib

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # leftovers of children are found below this process
    del sys.path[0]  # this folder: torch must not import our modules by mistake
    _sock = socket.socket(fileno=int(sys.argv[1]))
    _sock.send(str(os.getpid()).encode())
    for _name in (
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    ):
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # otherwise the exit of each child would scan everything that was ever imported
    _become(*_serve(_sock))()
