"""Processes that have their modules already: one process has imported them, and forks another for every command.

    @pytest.mark.imported
    def test_…:
        result = python("train.py", "--lr", "0.1")    # as `cli.python`, seconds earlier: torch is there
        job = start("-c", "import torch; …")          # as `cli.start`

    result = phalanx("ps")                            # of tests.kit.cli, in any test: phalanx is there

For tests that do not depend on how an interpreter starts: nothing else about these processes is special.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this file is also the program of that process
    from tests.kit.cli import Env, Handle, Result


TORCH, COMMANDS = "torch", "commands"  # what is imported: torch for scripts, the command line of phalanx
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_")  # an interpreter reads these when it starts


def start(*words: str, env: Env | None = None, cwd: str | None = None) -> Handle:
    """Start `python -u WORDS` in a new session; standard input is empty."""
    from tests.kit.cli import environment

    assert in_use(), "only a test that is marked `imported` has it"
    return _fork(TORCH, words, environment(env), cwd)


def command(words: Sequence[str], env: dict[str, str], cwd: str | None, init: int = 0) -> Handle | None:
    """Start `python -m phalanx WORDS` in a new session; standard input is empty. None: that needs a new interpreter.

    `init` is the pid of the init of a lab's node: the command starts in all its namespaces.
    """
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
        if __file__ in proc.command(pid):  # its pid may belong to another process by now
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
        words = (sys.executable, *(["-u"] if what == TORCH else []), __file__, what, str(theirs.fileno()))
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
            order = json.loads(data)
            pid = _fork_in(order["init"]) if order["init"] else os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for fd in (sock.detach(), woken, wake, fds.pop(), *children.values()):
                    os.close(fd)
                return order, fds
            children[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            sock.send(str(pid).encode())


def _fork_in(init: int) -> int:
    """Fork; the child is in all namespaces of this process."""
    inside = [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in ("pid", "uts", "ipc", "net", "mnt")]
    outside = os.open("/proc/self/ns/pid", os.O_RDONLY)
    _enter(inside[0])  # children only
    pid = os.fork()
    if pid:
        _enter(outside)
    else:
        for fd in inside[1:]:
            _enter(fd)
    for fd in (*inside, outside):
        os.close(fd)
    return pid


def _enter(namespace: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


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
    for stream, mode in ((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb")):
        setup._reopen(stream, mode)
    setup._reseed()
    script, *args = order["words"]
    if script == "-m":
        return _module(*args)
    if script != "-c":
        return main_module.prepare({"main": ("script", script), "args": args})
    main = main_module._fresh_main()
    text, *args = args
    sys.argv[:] = ["-c", *args]
    sys.path.insert(0, "")
    return functools.partial(exec, compile(text, "<string>", "exec", dont_inherit=True), main.__dict__)


def _module(name: str, *args: str) -> Any:
    import functools
    import runpy

    from phalanx.forkserver import linux

    sys.argv[:] = ["-m", *args]
    sys.orig_argv[:] = [sys.executable, "-m", name, *args]
    linux.set_command_line(sys.orig_argv)
    return functools.partial(runpy._run_module_as_main, name)  # type: ignore[attr-defined]


def _modules(what: str) -> list[str]:
    """What to import: of phalanx all that its commands import, or may."""
    import pkgutil

    import phalanx

    if what == TORCH:
        return [
            *("torch", "torch.distributed", "torch._dynamo", "torch.distributed.checkpoint"),
            "torch.distributed.fsdp",
        ]
    found = ["aiohttp"]
    for package in ("cli", "launcher", "control", "cluster", "recover", "diagnose"):
        path = [f"{phalanx.__path__[0]}/{package}"]
        found += [each.name for each in pkgutil.walk_packages(path, f"phalanx.{package}.")]
    return [name for name in found if "__main__" not in name]


if __name__ == "__main__":
    import ctypes
    import gc
    import importlib

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # what children leave behind is found below this process
    del sys.path[0]  # this folder: torch must not find our modules where it looks for others
    _sock = socket.socket(fileno=int(sys.argv[2]))
    _sock.send(str(os.getpid()).encode())
    for _name in _modules(sys.argv[1]):
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # otherwise the exit of each child would scan everything that was ever imported
    _become(*_serve(_sock))()
