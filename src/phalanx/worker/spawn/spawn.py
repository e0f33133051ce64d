"""`phalanx.spawn`: ranks from Python, in a script or a notebook.

losses = phalanx.spawn(train, ranks=4, args=(0.1,))     # what each rank returned, in the order of ranks

In the function the process group exists, and `phalanx.init()` uses it. Ranks are forks of this process if that is safe,
so a lambda or a function of a notebook works; otherwise they come from a fresh interpreter, to which the function is
sent by pickle. Results are pickled too, over a pipe from our own child: as trustworthy as the function.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from phalanx.errors import LaunchError, UsageError
from phalanx.worker.spawn import keeper
from phalanx.worker.spawn.keeper import Call, SpawnSpec
from phalanx.worker.spawn.waiting import RankEnds, SpawnWait

Result = TypeVar("Result")


def spawn(
    fn: Callable[..., Result],
    ranks: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    fresh: bool | None = None,
    backend: str | None = None,
    join: bool = True,
) -> list[Result]:
    """`phalanx.spawn(fn, ranks=4, args=(…))`: call `fn(*args, **kwargs)` in `ranks` processes; return all results.

    timeout  seconds for all ranks to end. Default: none
    fresh    True: ranks come from a new interpreter; False: they are forks of this process. Default: forks, if safe
    backend  of the process group. Default: shm; with GPUs gloo, and nccl too if there is a GPU per rank
    join     False: make no process group, for a function that calls `init_process_group` itself

    If a rank fails, the others are ended and RankError is raised with its traceback.
    """
    _check(fn, ranks)
    why = must_not_fork()
    if fresh is False and why:
        raise UsageError(f"this process cannot be forked: {why}", fix="leave fresh=False out")
    call: Call = (fn, tuple(args), dict(kwargs or {}))
    with _Pipes(ranks, backend or ("" if join else None)) as ends:
        start = _start_fresh if fresh or why else _start_forked
        pid = start(ends, call)
        ends.close_theirs()
        values: list[Result] = SpawnWait(ends.mine, pid, timeout).results()
    return values


def must_not_fork() -> str:
    """Return why ranks cannot be forks of this process; "": they can.

    Threads are no reason. The thread pool of torch would hang a fork, but it belongs to the thread that uses it: ranks
    are forked from a new thread, which has none, and make their own.
    """
    if keeper.preparing:
        raise UsageError(
            "spawn was called while a fresh rank was importing this script",
            fix='put the call under `if __name__ == "__main__":`',
        )
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"{name.upper()} is already initialized in it"
    if _holds("/dev/nvidia-uvm"):
        return "CUDA is already initialized in it"
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return "it is in a process group"
    if multiprocessing.current_process().daemon:
        return "it is a daemon of multiprocessing, such as a worker of a DataLoader, which may not have children"
    return ""


def _holds(path: str) -> bool:
    """Return whether this process has a file open. Only cuInit opens the memory device of the driver."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                return True
    return False


def _check(fn: Any, ranks: Any) -> None:
    if not callable(fn):
        raise UsageError(f"spawn takes a function, not {fn!r}", fix="phalanx.spawn(train, ranks=4, args=(…))")
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks={ranks!r}: at least one", fix="phalanx.spawn(train, ranks=4)")


# -- starting the keeper


class _Pipes:
    """Both ends of all pipes between the caller and the keeper."""

    def __init__(self, ranks: int, backend: str | None) -> None:
        self._stack = contextlib.ExitStack()
        self._theirs = contextlib.ExitStack()
        try:
            listener = socket.create_server((keeper.ADDRESS, 0), backlog=1024)
            self._theirs.callback(listener.close)
            stop, control = self._pipe(theirs_reads=True)
            told, status = self._pipe()
            pairs = [[self._pipe() for _ in range(3)] for _ in range(ranks)]
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                least = 6 * ranks + len(os.listdir("/proc/self/fd")) + 10
                raise LaunchError(
                    f"{ranks} ranks need more open files than this process may have", fix=f"ulimit -n {least}"
                ) from None
            raise
        self.mine = RankEnds(control, told, tuple((pair[0][0], pair[1][0], pair[2][0]) for pair in pairs))
        self.spec = SpawnSpec(
            caller=os.getpid(),
            ranks=ranks,
            backend=backend,
            control=stop,
            status=status,
            listener=listener.fileno(),
            port=listener.getsockname()[1],
            pipes=tuple((pair[0][1], pair[1][1], pair[2][1]) for pair in pairs),
            theirs=(control, told, *(fd for pipes in self.mine.pipes for fd in pipes)),
        )

    def _pipe(self, *, theirs_reads: bool = False) -> tuple[int, int]:
        """Read end, write end."""
        ends = os.pipe()
        mine, theirs = (1, 0) if theirs_reads else (0, 1)
        self._stack.callback(os.close, ends[mine])
        self._theirs.callback(os.close, ends[theirs])
        os.set_blocking(ends[mine], theirs_reads)
        return ends

    def close_theirs(self) -> None:
        self._theirs.close()

    def close(self) -> None:
        self._theirs.close()
        self._stack.close()

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _start_forked(ends: _Pipes, call: Call) -> int:
    """Fork from a new thread: see `must_not_fork`."""
    found: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads: see above
            pid = os.fork()
        if pid:
            found.append(pid)
            return
        try:
            keeper.keep(ends.spec, call)
        except BaseException:  # in the fork: nothing may propagate into the caller's code
            import traceback

            keeper.report(ends.spec.status, broken=traceback.format_exc())
        finally:
            os._exit(0)

    _flush()
    thread = threading.Thread(target=fork, name="spawn")
    thread.start()
    thread.join()
    if not found:
        raise LaunchError("this process could not be forked", fix="ulimit -u, or the memory that is left")
    return found[0]


def _flush() -> None:
    """Flush the streams: every fork would write their buffers again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the script
            stream.flush()


def _start_fresh(ends: _Pipes, call: Call) -> int:
    payload = _pickled(call)
    order = keeper.send(replace(ends.spec, theirs=()), payload, _preparation() if b"__main__" in payload else None)
    fd = os.memfd_create("phalanx-spawn")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(order)
        os.lseek(fd, 0, os.SEEK_SET)
        spec = ends.spec
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        code = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.worker.spawn.keeper import main; main({fd})"
        process = subprocess.Popen(
            [sys.executable, *flags, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd, spec.control, spec.status, spec.listener, *(fd for pipes in spec.pipes for fd in pipes)),
            start_new_session=True,
        )
    finally:
        os.close(fd)
    process.returncode = 0  # `SpawnWait` waits for it, by its pid
    return process.pid


def _pickled(call: Call) -> bytes:
    """Pickle the call, with cloudpickle if it is installed: that supports functions of a notebook, and closures."""
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        found: bytes = pickler.dumps(call)
        if pickler is pickle and b"__main__" in found and not _main_can_be_imported():
            raise pickle.PicklingError(
                "it refers to __main__, which is not a file here, so a fresh process cannot import it"
            )
    except Exception as error:  # pickling runs code of the objects, which may raise anything
        why = must_not_fork()
        raise UsageError(
            f"the function and its arguments cannot be sent to fresh ranks: {error}",
            details=[f"they cannot be forks of this process: {why}"] if why else [],
            fix="put the function into a module of its own, or: pip install cloudpickle",
        ) from error
    return found


def _main_can_be_imported() -> bool:
    """Return whether __main__ is a file: not in a notebook, nor if the program comes from standard input."""
    found = _preparation()
    return "init_main_from_name" in found or os.path.isfile(found.get("init_main_from_path", ""))


def _preparation() -> dict[str, Any]:
    """Return how a fresh process finds the modules of this one, also its __main__."""
    from multiprocessing import spawn as multiprocessing_spawn

    found: dict[str, Any] = multiprocessing_spawn.get_preparation_data("keeper")
    return {name: value for name, value in found.items() if name not in ("authkey", "start_method", "log_to_stderr")}
