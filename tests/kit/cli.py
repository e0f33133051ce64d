"""The real commands, run as a user runs them.

result = phalanx("run", "-g", "2", "train.py")
job = start("run", "sleepy.py")                # runs beside the test, and ends with it
job = terminal("run", "sleepy.py")             # the same in a terminal: job.send(b"\\x03")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from tests.kit import imported, state
from tests.kit.handle import Handle, Terminal, resize, take_terminal
from tests.kit.ports import free_port
from tests.kit.proc import alive, command, descendants, every, until

__all__ = [
    "PHALANX",
    "PYTHON",
    "TORCHRUN",
    "Env",
    "Handle",
    "Result",
    "Terminal",
    "alive",
    "descendants",
    "environment",
    "free_port",
    "phalanx",
    "python",
    "run",
    "shut_down",
    "start",
    "terminal",
    "torchrun",
    "until",
    "warm",
    "warm_environment",
]

PYTHON = (sys.executable, "-u")
PHALANX = (sys.executable, "-m", "phalanx")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
STOP_WARM = ("warm", "--stop")

Env = Mapping[str, str | None]


class Options(TypedDict, total=False):
    env: Env | None  # changes to the environment of the test: a value sets, None removes
    cwd: str | None
    input: str | None  # standard input; default: empty


@dataclass(frozen=True)
class Result:
    code: int  # minus the number of the signal that killed the command
    out: str
    err: str
    seconds: float
    raw_out: bytes = b""
    raw_err: bytes = b""


def phalanx(*args: str, timeout: float = 60, **options: Unpack[Options]) -> Result:
    return run((*PHALANX, *args), timeout=timeout, **options)


def python(*args: str, timeout: float = 60, **options: Unpack[Options]) -> Result:
    return run((*PYTHON, *args), timeout=timeout, **options)


def torchrun(*args: str, timeout: float = 60, **options: Unpack[Options]) -> Result:
    # It creates a log directory even if nothing is logged, and never removes it.
    with tempfile.TemporaryDirectory(prefix="torchrun-") as tmp:
        options["env"] = {"TMPDIR": tmp, **(options.get("env") or {})}
        return run((*TORCHRUN, *args), timeout=timeout, **options)


def run(words: Sequence[str], *, timeout: float = 60, **options: Unpack[Options]) -> Result:
    """Run the command to its end. Fails if a leftover process keeps its output open."""
    with start(words=words, **options) as job:
        code = job.wait(timeout)
        if not job.drained():
            raise AssertionError(f"{' '.join(words)}: ended, but its output is held open by\n{_holders(job)}")
        raw = job.bytes("out"), job.bytes("err")
        seconds = (job.ended or job.started) - job.started
        return Result(code, job.out, job.err, seconds, *raw)


def start(*args: str, words: Sequence[str] = (), **options: Unpack[Options]) -> Handle:
    """Start `phalanx ARGS`, or the command `words`, in its own session; standard input is empty."""
    text = options.get("input")
    words = tuple(words or (*PHALANX, *args))
    if words[: len(PHALANX)] == PHALANX and text is None:
        forked = imported.command(words[len(PHALANX) :], environment(options.get("env")), options.get("cwd"))
        if forked is not None:
            return forked
    out, out_end = os.pipe2(os.O_CLOEXEC)
    err, err_end = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            list(words),
            env=environment(options.get("env")),
            cwd=options.get("cwd"),
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=out_end,
            stderr=err_end,
            start_new_session=True,
        )
    except BaseException:
        os.close(out)
        os.close(err)
        raise
    finally:
        os.close(out_end)
        os.close(err_end)
    job = Handle(process, {out: "out", err: "err"})
    if text is not None and process.stdin:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(text.encode())
            process.stdin.close()
    return job


def terminal(
    *args: str,
    words: Sequence[str] = (),
    env: Env | None = None,
    cwd: str | None = None,
    size: tuple[int, int] = (24, 80),
) -> Terminal:
    """Same in a new pseudo-terminal that controls a new session, as in its own window."""
    screen, tty = os.openpty()
    resize(screen, *size)
    try:
        process = subprocess.Popen(
            list(words or (*PHALANX, *args)),
            env=environment({"TERM": "xterm-256color", **(env or {})}),
            cwd=cwd,
            stdin=tty,
            stdout=tty,
            stderr=tty,
            start_new_session=True,
            preexec_fn=take_terminal,  # noqa: PLW1509
        )
    except BaseException:
        os.close(screen)
        raise
    finally:
        os.close(tty)
    return Terminal(process, screen)


@contextlib.contextmanager
def warm(*args: str, env: Env | None = None, cwd: str | None = None) -> Iterator[Result]:
    """Keep a warm fork server for the duration of the block."""
    result = phalanx("warm", *args, env=env, cwd=cwd)
    assert result.code == 0, result.out + result.err
    try:
        yield result
    finally:
        phalanx(*STOP_WARM, env=env, cwd=cwd)


@contextlib.contextmanager
def warm_environment(*preload: str, **variables: str) -> Iterator[Env]:
    """Yield an environment with a warm fork server, for many short runs: each saves seconds. No files may be left
    there.

    Later calls get the same fork server, with empty folders; `shut_down` ends it.
    """
    key = (frozenset(preload) - ALWAYS_IMPORTED, frozenset(variables.items()))
    found = next((one for one in _environments if one.key == key and not one.used), None)
    if found is None:
        found = _WarmEnvironment(key)
        _environments.append(found)
    found.used = True
    try:
        found.warm()
        state.beside.add(found.fork_server)
        yield found.env
        found.clear()
    finally:
        state.beside.discard(found.fork_server)
        found.used = False


def shut_down() -> None:
    """End all warm fork servers, after the last test."""
    while _environments:
        _environments.pop().shut_down()


# Modules that `phalanx warm` always imports, or that are cheap afterwards: one fork server serves all tests.
ALWAYS_IMPORTED = {"torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"}
_ROOT = tempfile.gettempdir()  # of the process, not of the test


class _WarmEnvironment:
    def __init__(self, key: tuple[frozenset[str], frozenset[tuple[str, str]]]) -> None:
        self.key = key
        self.used = False
        self.fork_server = 0
        self._root = tempfile.mkdtemp(prefix="kit-", dir=_ROOT)
        # One thread, as in the fork server: OMP_NUM_THREADS is always set for several ranks, but not for one.
        self.env: Env = {
            "TMPDIR": f"{self._root}/tmp",
            "PHALANX_HOME": f"{self._root}/home",
            "OMP_NUM_THREADS": "1",
            **dict(key[1]),
        }
        os.mkdir(f"{self._root}/tmp")

    def warm(self) -> None:
        """Start the fork server, unless it is running. A test may have killed it."""
        if self.fork_server and alive(self.fork_server):
            return
        # Other tests must not find it.
        with state.orphans_left_alone():
            made = phalanx("warm", "--preload", ",".join(self.key[0] | ALWAYS_IMPORTED), env=self.env, timeout=180)
        assert made.code == 0, made.out + made.err
        self.fork_server = int(made.out.split("(pid ")[1].split(")")[0])

    def clear(self) -> None:
        left = [name for name in os.listdir(f"{self._root}/tmp") if not name.startswith("torchinductor_")]
        for folder, names in ((f"{self._root}/tmp", left), (f"{self._root}/home", os.listdir(f"{self._root}/home"))):
            for path in (f"{folder}/{name}" for name in names if name != "warm"):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        assert not left, f"leaked temporary files: {left}"

    def shut_down(self) -> None:
        if self._root in command(self.fork_server):  # not another process that has its pid now
            os.kill(self.fork_server, signal.SIGTERM)  # at once: xdist does not wait for long
        shutil.rmtree(self._root, ignore_errors=True)


_environments: list[_WarmEnvironment] = []


def environment(changes: Env | None = None) -> dict[str, str]:
    # A user's shell would not set the variables of pytest.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def _holders(job: Handle) -> str:
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in job.open_streams}
    found = []
    for process in every():
        with contextlib.suppress(OSError):
            fds = os.listdir(f"/proc/{process.pid}/fd")
            if process.pid != os.getpid() and held & {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in fds}:
                found.append(f"process {process.pid}: {command(process.pid)}")
    return "\n".join(found)
