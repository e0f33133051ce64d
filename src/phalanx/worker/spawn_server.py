"""The fork server of `phalanx.spawn`, and the ranks that it forks.

    serve(sock, caller, call)   in a fork of the caller, or in a fresh interpreter: never returns

It is the fork server of `phalanx run` (`forkserver/server.py`), in a process that has the function in memory. A rank
calls the function, and sends its result or exception through a pipe: pickle, from a child to the process that started
it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from phalanx.contract.messages import function_call
from phalanx.contract.messages.function_call import STACK_SIGNAL, Call
from phalanx.contract.variables import THREADS
from phalanx.forkserver import signed_store, wire
from phalanx.forkserver.child import error_file
from phalanx.forkserver.server import ForkServer
from phalanx.worker.rendezvous import device

logger = logging.getLogger(__name__)


def main(sock: int, caller: int, call: int) -> None:
    """Serve in a fresh interpreter. `call` is the descriptor of a packed call."""
    connection = socket.socket(fileno=sock)
    try:
        with open(call, "rb") as file:
            unpacked = function_call.unpack(file.read())
    except BaseException as error:  # reported to the caller
        wire.send(connection, {"is": "broken", "why": _failure(error)["traceback"]})
        os._exit(1)
    serve(connection, caller, unpacked)


def serve(sock: socket.socket, caller: int, call: Call) -> None:
    """Import torch once, then fork ranks for the caller until it ends. Exits; never returns."""
    authkey = multiprocessing.current_process().authkey
    try:
        _leave_caller()
        parent = os.pidfd_open(caller)
        if os.getppid() != caller:
            os._exit(1)
        wire.send(sock, {"is": "ready", "torch": _import_torch()})
        spec = ForkServer(sock, parent).serve()
    except BaseException:  # nothing may propagate into the caller's code, of which this is a fork
        with contextlib.suppress(OSError):
            wire.send(sock, {"is": "broken", "why": traceback.format_exc()})
        os._exit(1)
    # A rank. It is a process of multiprocessing, which resets its state: a fork has the state of the caller.
    process: Any = multiprocessing.get_context("fork").Process(target=_run, args=(spec, call))
    process.authkey = authkey  # managers of the caller ask for it
    os._exit(process._bootstrap())


def _leave_caller() -> None:
    """Undo the caller's setup: session, signal handlers, exit functions, streams, display of exceptions."""
    with contextlib.suppress(PermissionError):  # it already leads a session
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    atexit._clear()
    _plain_streams()
    sys.excepthook = sys.__excepthook__  # the hook of a notebook sends messages, and lacks Python's hints


_former: list[Any] = []  # kept alive: their destructors would close the descriptors


def _plain_streams() -> None:
    """Replace the streams: those of a notebook use threads that a fork does not have, and locks that these held."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # one that the caller has closed
        os.set_inheritable(fd, True)
    os.close(fd)
    _former.extend((sys.stdin, sys.stdout, sys.stderr))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(fd: int) -> TextIO:
    return open(fd, "w" if fd else "r", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _import_torch() -> bool:
    """Import torch before the forks. A function that does not need it runs without it."""
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        return False
    return True


# -- in a rank


def _run(spec: dict[str, Any], call: Call) -> None:
    result, stack = spec["inherited"]
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    signed_store.use_key(bytes.fromhex(spec["store_key"]))
    function, args, kwargs = call
    failed = False
    try:
        _set_threads()
        with _group(spec["backend"]):
            value = function(*args, **kwargs)
        answer = _packed(value)
    except SystemExit as error:
        failed = error.code not in (None, 0)
        # `phalanx.main` has printed its error, and raises SystemExit with it as the cause.
        answer = _failure(error.__cause__ or error) if failed else _packed(None)
    except BaseException as error:  # reported to the caller
        failed = True
        answer = _failure(error)
    with contextlib.suppress(BrokenPipeError), open(result, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    atexit._run_exitfuncs()
    raise SystemExit(1 if failed or "error" in answer else 0)


def _set_threads() -> None:
    """Set torch's number of threads, which it read from the environment of the fork server."""
    threads = os.environ.get(THREADS, "")
    if (torch := sys.modules.get("torch")) is not None and threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))


@contextlib.contextmanager
def _group(backend: str | None) -> Iterator[None]:
    """Create the process group, unless the function does (None)."""
    if backend is None:
        yield
        return
    import torch.distributed as dist

    from phalanx.collectives import registration

    registration.register()
    dist.init_process_group(backend or _default_backend())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _default_backend() -> str:
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.cuda.is_available() or torch.cuda.device_count() < size:  # NCCL needs a GPU per rank
        return "gloo" if torch.cuda.is_available() else device.SHM  # gloo supports tensors on a GPU too
    torch.cuda.set_device(rank)
    return device.BOTH


def _packed(value: Any) -> dict[str, Any]:
    try:
        return {"value": pickle.dumps(value)}
    except Exception as error:  # pickling runs code of the object, which may raise anything
        what = f"{type(value).__module__}.{type(value).__qualname__}"
        return {
            "error": f"its result, a {what}, cannot be sent back: {error}",
            "fix": "return what pickle can take: numbers, text, lists, dicts, tensors, objects of importable classes",
            "traceback": "",
            "time": time.time(),
        }


def _printed(error: BaseException) -> str:
    """Return the traceback as Python prints it. Before Python 3.12, its hints are only there."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        sys.__excepthook__(type(error), error, error.__traceback__)
    return text.getvalue()


def _failure(error: BaseException) -> dict[str, Any]:
    now = time.time()
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is ours
    kind = type(error).__name__
    text = f"{kind}: {error}" if str(error) else kind
    answer: dict[str, Any] = {
        "error": text + error_file.hint(text, _printed(error)),
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "time": now,
    }
    try:
        answer["exception"] = pickle.dumps(error)
    except Exception:  # many exceptions cannot be pickled; the traceback has the text
        logger.debug("an exception cannot be pickled", exc_info=True)
    return answer
