"""`phalanx.spawn`: ranks from Python, in a script or a notebook.

losses = phalanx.spawn(train, ranks=4, args=(0.1,))     # what each rank returned, in the order of ranks

In the function the process group exists, and `phalanx.init()` uses it. The fork server of the ranks is a fork of this
process if that is safe, so a lambda or a function of a notebook works; otherwise it is a fresh interpreter, to which
the function is sent by pickle. Results are pickled too, over a pipe from our own child: as trustworthy as the function.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from phalanx.contract.messages import function_call
from phalanx.contract.messages.function_call import Call
from phalanx.errors import LaunchError, UsageError
from phalanx.forkserver import linux
from phalanx.launcher.function_call import with_run
from phalanx.launcher.spawn.group import SpawnGroup

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

    A function with a first argument `run`, as for `phalanx.main`, gets the `phalanx.Run` of its rank in addition.

    - `timeout`: seconds for all ranks to end. Default: none
    - `fresh`: True: ranks come from a new interpreter; False: they are forks of this process. Default: forks, if safe
    - `backend`: of the process group. Default: shm; with GPUs gloo, and nccl too if there is a GPU per rank
    - `join`: False: make no process group, for a function that calls `init_process_group` itself

    If a rank fails, the others are ended and RankError is raised with its traceback. After a timeout (LaunchError) and
    Ctrl-C (KeyboardInterrupt), all are ended, and the exception says where each rank was.
    """
    function_call.check_caller("spawn")
    _check(fn, ranks)
    why = must_not_fork()
    if fresh is False and why:
        raise UsageError(f"this process cannot be forked: {why}", fix="leave fresh=False out")
    kwargs = dict(kwargs or {})
    call: Call = (with_run(fn, args, kwargs), tuple(args), kwargs)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = _start_fresh(theirs, call, why) if fresh or why else _start_forked(ours, theirs, call)
        # The pipes are made after the fork server, which must not inherit them.
        with SpawnGroup(ours, pid, ranks, backend or ("" if join else None), timeout) as group:
            try:
                values: list[Result] = group.results()
            except (LaunchError, KeyboardInterrupt) as error:
                failure = error
            else:
                return values
    raise failure.with_traceback(None) from None  # frames of phalanx do not help with the failure of a rank


def must_not_fork() -> str:
    """Return why ranks cannot be forks of this process; "": they can.

    Threads are allowed. The thread pool of torch would hang a fork, but it belongs to the thread that uses it: ranks
    are forked from a new thread, which has none, and create their own.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"{name.upper()} is already initialized in it"
    if linux.holds("/dev/nvidia-uvm"):  # only cuInit opens it
        return "CUDA is already initialized in it"
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return "it is in a process group"
    if multiprocessing.current_process().daemon:
        return "it is a daemon of multiprocessing, such as a worker of a DataLoader, which may not have children"
    return ""


def _check(fn: Any, ranks: Any) -> None:
    if not callable(fn):
        raise UsageError(f"spawn takes a function, not {fn!r}", fix="phalanx.spawn(train, ranks=4, args=(…))")
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks={ranks!r}: at least one", fix="phalanx.spawn(train, ranks=4)")


def _start_forked(ours: socket.socket, theirs: socket.socket, call: Call) -> int:
    """Fork a fork server from a new thread: see `must_not_fork`."""
    from phalanx.worker import spawn_server  # here, so that the next call finds it imported

    caller = os.getpid()
    found: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads: see above
            pid = os.fork()
        if pid:
            found.append(pid)
            return
        ours.close()
        spawn_server.serve(theirs, caller, call)

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


def _start_fresh(theirs: socket.socket, call: Call, why: str) -> int:
    """Start a fork server in a fresh interpreter. It inherits a file without a name that contains the call."""
    payload = function_call.pack(*call, details=[f"they cannot be forks of this process: {why}"] if why else [])
    fd = os.memfd_create("phalanx-spawn")
    with open(fd, "wb") as file:
        file.write(payload)
        file.flush()
        os.lseek(fd, 0, os.SEEK_SET)
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        numbers = (theirs.fileno(), os.getpid(), fd)
        code = f"import sys; sys.path[:] = {sys.path!r}; from phalanx.worker.spawn_server import main; main{numbers}"
        process = subprocess.Popen(
            [sys.executable, *flags, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), fd),
            start_new_session=True,
        )
    process.returncode = 0  # `SpawnGroup` waits for it, by its pid
    return process.pid
