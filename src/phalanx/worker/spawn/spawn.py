"""Ranks from Python, in a script or a notebook:

losses = phalanx.spawn(train, ranks=4, args=(0.1,))     # what each rank returned, in the order of ranks

Inside, the process group is there, and `phalanx.init()` takes it as it is. Ranks are forks of this process
where that is safe, so a lambda or a function of a notebook will do; otherwise they come from a fresh interpreter, to
which the function is sent by pickle. What they return comes back by pickle too, over a pipe from our own child: as
trustworthy as the function.
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
    """Call `fn(*args, **kwargs)` in that many processes, and return what each returned.

    The process group is made before the call and ended after it: of `backend`, or shm; where there are GPUs gloo, with
    nccl beside it if there is one for every rank. `join=False` leaves it to the function, as to one that calls
    `init_process_group` itself. `fresh` says whether ranks come from a new interpreter (True), from this process
    (False), or from this process if that is safe (None). The first rank to fail ends the others, and is raised as a
    RankError.
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
    """Why ranks cannot be forks of this process, or nothing.

    Threads are no reason. The pool in which torch computes would hang a fork, but it belongs to the thread that uses
    it: ranks are forked from a new thread, which has none, and so make their own.
    """
    if keeper.preparing:
        raise UsageError(
            "spawn was called while a fresh rank imported this script",
            fix='put the call under `if __name__ == "__main__":`',
        )
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"{name.upper()} is already up in it"
    if _holds("/dev/nvidia-uvm"):
        return "CUDA is already up in it"
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return "it is in a process group itself"
    if multiprocessing.current_process().daemon:
        return "it is a daemon of multiprocessing, such as a DataLoader's worker, which may have no children"
    return ""


def _holds(path: str) -> bool:
    """The driver's memory device is opened by cuInit and by nothing else: it tells even where torch does not know."""
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


# -- the keeper's start


class _Pipes:
    """Both ends of everything between the caller and the keeper."""

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
        self.crew = SpawnSpec(
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
    """From a new thread: `must_not_fork` says why."""
    found: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: what is said above
            pid = os.fork()
        if pid:
            found.append(pid)
            return
        try:
            keeper.keep(ends.crew, call)
        except BaseException:
            import traceback

            keeper.tell(ends.crew.status, broken=traceback.format_exc())
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
    """What waits in a buffer would be written by every fork once more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _start_fresh(ends: _Pipes, call: Call) -> int:
    payload = _pickled(call)
    order = keeper.send(replace(ends.crew, theirs=()), payload, _preparation() if b"__main__" in payload else None)
    fd = os.memfd_create("phalanx-spawn")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(order)
        os.lseek(fd, 0, os.SEEK_SET)
        crew = ends.crew
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        code = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.worker.spawn.keeper import main; main({fd})"
        process = subprocess.Popen(
            [sys.executable, *flags, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd, crew.control, crew.status, crew.listener, *(fd for pipes in crew.pipes for fd in pipes)),
            start_new_session=True,
        )
    finally:
        os.close(fd)
    process.returncode = 0  # it is waited for here, by its number
    return process.pid


def _pickled(call: Call) -> bytes:
    """cloudpickle also takes functions of a notebook, and closures. Without it, what can be imported."""
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        found: bytes = pickler.dumps(call)
        if pickler is pickle and b"__main__" in found and not _main_can_be_imported():
            raise pickle.PicklingError(
                "it refers to __main__, which is no file here, so a fresh process cannot import it"
            )
    except Exception as error:
        why = must_not_fork()
        raise UsageError(
            f"the function and its arguments cannot be sent to fresh ranks: {error}",
            details=[f"they cannot be forks of this process: {why}"] if why else [],
            fix="put the function into a module of its own, or: pip install cloudpickle",
        ) from error
    return found


def _main_can_be_imported() -> bool:
    """Not in a notebook, and not when the program comes from standard input."""
    found = _preparation()
    return "init_main_from_name" in found or os.path.isfile(found.get("init_main_from_path", ""))


def _preparation() -> dict[str, Any]:
    """How a fresh process finds the modules of this one, its __main__ too."""
    from multiprocessing import spawn as multiprocessing_spawn

    found: dict[str, Any] = multiprocessing_spawn.get_preparation_data("keeper")
    return {name: value for name, value in found.items() if name not in ("authkey", "start_method", "log_to_stderr")}
