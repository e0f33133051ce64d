"""The keeper: the process between the caller of `spawn` and its ranks. It forks them, hosts their store and ends them.

It is a fork of the caller, or a fresh interpreter. In both cases it imports torch once and forks the ranks before it
has a second thread. It ends them when one fails, when the caller asks for it, and when the caller is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

from phalanx.contract.placement import RankPlacement
from phalanx.contract.variables import (
    INTERFACES,
    MEMORY,
    RUN,
    RUN_FOLDER,
    THREADS,
    TOPOLOGY,
    WorkerVariables,
    worker_environment,
)
from phalanx.worker.rendezvous import device
from phalanx.worker.spawn import linux

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
SETTLE = 0.2  # seconds after a failure for other ranks to report theirs: the first cause may be reported second
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
PATIENCE = 0.5  # seconds for what ends by itself: resource tracker, torch's manager of shared memory

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

preparing = False  # a fresh interpreter is importing the caller's script


@dataclass(frozen=True)
class SpawnSpec:
    """What the keeper needs to know. The descriptors are its ends."""

    caller: int  # pid
    ranks: int
    backend: str | None  # of the process group; "": choose one; None: make no group
    control: int  # a byte here: stop
    status: int  # a line of JSON per rank that has ended
    listener: int  # bound already, so that the port stays free
    port: int
    pipes: tuple[tuple[int, int, int], ...]  # per rank: stdout, stderr, result
    theirs: tuple[int, ...] = ()  # the caller's ends, which a fork has too


def keep(spec: SpawnSpec, call: Call) -> None:
    """Start the ranks, and return when they and all their descendants have ended."""
    _leave_the_caller(spec)
    caller = os.pidfd_open(spec.caller)
    if os.getppid() != spec.caller:
        return
    linux.adopt_orphans()
    hosts = True
    try:
        import torch.distributed  # noqa: F401
    except ImportError:  # a function that does not need it may still run
        hosts = False
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    processes: dict[int, BaseProcess] = {}
    for rank in range(spec.ranks):
        process = _fork(spec, rank, call, (caller, woken, wake, *processes))
        # At once: starting the next one reaps those that have ended.
        processes[os.pidfd_open(process.pid or 0)] = process
    for fd in (fd for pipes in spec.pipes for fd in pipes):
        os.close(fd)
    # A handler that does nothing, so that the wakeup descriptor is written.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    store = _host(spec) if hosts else None
    _watch(spec, processes, (spec.control, caller, woken))
    pids = {process.pid for process in processes.values() if process.pid}
    pids |= linux.end_descendants(PATIENCE, GRACE)
    linux.remove_shared_memory(pids)
    del store


def _leave_the_caller(spec: SpawnSpec) -> None:
    """Undo what the caller has set up: signal handlers, exit functions, the controlling terminal."""
    for fd in spec.theirs:
        os.close(fd)
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    atexit._clear()
    _plain_streams()


def _host(spec: SpawnSpec) -> Any:
    """Host the store, after the forks, because it has a thread. Ranks that connect earlier wait in the queue."""
    from torch.distributed import TCPStore

    return TCPStore(ADDRESS, spec.port, is_master=True, wait_for_workers=False, master_listen_fd=spec.listener)


def _fork(spec: SpawnSpec, rank: int, call: Call, ours: tuple[int, ...]) -> BaseProcess:
    # Not a bare fork: multiprocessing also resets its own state in the rank.
    process = multiprocessing.get_context("fork").Process(target=_run, args=(spec, rank, call, os.getpid(), ours))
    process.start()
    return process


def _watch(spec: SpawnSpec, processes: Mapping[int, BaseProcess], stops: tuple[int, ...]) -> None:
    """Wait until every rank has ended. End all if one fails, or if asked to stop."""
    alive = dict(enumerate(processes.values()))
    failed, asked, stop_at = False, False, float("inf")
    with selectors.DefaultSelector() as ready:
        for rank, fd in enumerate(processes):
            ready.register(fd, selectors.EVENT_READ, rank)
        for fd in stops:
            ready.register(fd, selectors.EVENT_READ, None)
        while alive:
            wait = max(stop_at - time.monotonic(), 0.0)
            for key, _ in ready.select(None if wait == float("inf") else wait):
                ready.unregister(key.fileobj)
                if key.data is None:
                    failed, stop_at = True, 0.0
                    continue
                os.close(key.fd)
                code = alive.pop(key.data).exitcode
                report(spec.status, rank=key.data, code=code, time=time.time(), stopped=asked)
                if code and not failed:
                    failed, stop_at = True, time.monotonic() + SETTLE
            if time.monotonic() >= stop_at and alive:
                for process in alive.values():
                    process.kill() if asked else process.terminate()
                asked, stop_at = True, time.monotonic() + GRACE


def report(status: int, **what: Any) -> None:
    """Send a line of JSON to the caller."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, json.dumps(what).encode() + b"\n")


# -- in a rank


def _run(spec: SpawnSpec, rank: int, call: Call, keeper: int, ours: tuple[int, ...]) -> None:
    linux.die_with_parent(keeper)
    result = _settle(spec, rank, ours)
    os.environ.update(_environment(spec, rank))
    function, args, kwargs = call
    failed = False
    try:
        _calm()
        with _group(spec.backend):
            value = function(*args, **kwargs)
        answer = _packed(value)
    except SystemExit as error:
        failed = error.code not in (None, 0)
        # `phalanx.main` has printed its error, and raises SystemExit with that as the cause.
        answer = _failure(error.__cause__ or error) if failed else _packed(None)
    except BaseException as error:  # reported to the caller
        failed = True
        answer = _failure(error)
    with contextlib.suppress(BrokenPipeError), open(result, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    atexit._run_exitfuncs()
    raise SystemExit(1 if failed or "error" in answer else 0)


def _settle(spec: SpawnSpec, rank: int, ours: tuple[int, ...]) -> int:
    """Set up the streams of a rank, close the descriptors of others, and return the one for the result."""
    out, err, result = spec.pipes[rank]
    for number, fd in ((1, out), (2, err)):
        os.dup2(fd, number)
    _plain_streams()
    for fd in {fd for pipes in spec.pipes for fd in pipes} - {result}:
        os.close(fd)
    for fd in (spec.control, spec.status, spec.listener, *ours):
        os.close(fd)
    return result


_former: list[Any] = []  # kept: their destructors would close the descriptors


def _plain_streams() -> None:
    """Replace the streams: those of a notebook use threads that a fork does not have, and locks that they held."""
    _former.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = _writer(1), _writer(2)
    setattr(sys, "__stdout__", sys.stdout)  # noqa: B010
    setattr(sys, "__stderr__", sys.stderr)  # noqa: B010


def _writer(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _environment(spec: SpawnSpec, rank: int) -> dict[str, str]:
    """Return the variables of a rank, as under `phalanx run` on one node."""
    for name in [*os.environ]:
        if name in (RUN, RUN_FOLDER, MEMORY, TOPOLOGY) or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    member = WorkerVariables(
        placement=RankPlacement(
            rank=rank,
            world_size=spec.ranks,
            local_rank=rank,
            local_world_size=spec.ranks,
            node_rank=0,
            node_count=1,
        ),
        role="default",
        run_id=f"spawn-{spec.caller}",
        run="",
        run_folder="",
        address=ADDRESS,
        port=spec.port,
        attempt=0,
        max_restarts=0,
        error_file="",
        signals="",
    )
    found = {name: value for name, value in worker_environment(member, os.environ).items() if value}
    if spec.ranks > 1 and THREADS not in os.environ:
        found[THREADS] = "1"
    # All ranks are on this host, whatever its name resolves to.
    return found | {name: form.format("lo") for name, form in INTERFACES.items() if name not in os.environ}


def _calm() -> None:
    """Seed the random generators, whose state forks share, and set the number of threads."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
        threads = os.environ.get(THREADS, "")
        if threads.isdecimal() and int(threads):
            torch.set_num_threads(int(threads))  # torch has read the variable at its import, in the keeper


@contextlib.contextmanager
def _group(backend: str | None) -> Any:
    """Make the process group, unless the function does."""
    if backend is None:
        yield
        return
    import torch.distributed as dist

    from phalanx.collectives import registration

    registration.register()
    dist.init_process_group(backend or _usual())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _usual() -> str:
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


def _failure(error: BaseException) -> dict[str, Any]:
    now = time.time()
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is ours
    kind = type(error).__name__
    answer: dict[str, Any] = {
        "error": f"{kind}: {error}" if str(error) else kind,
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "time": now,
    }
    try:
        answer["exception"] = pickle.dumps(error)
    except Exception:  # many exceptions cannot be pickled; the traceback has the text
        logger.debug("an exception cannot be pickled", exc_info=True)
    return answer


# -- in a fresh interpreter


def send(spec: SpawnSpec, payload: bytes, preparation: dict[str, Any] | None) -> bytes:
    """Return what `main` reads, as pickle: from our own process to its child."""
    return pickle.dumps({"spec": asdict(spec), "payload": payload, "preparation": preparation})


def main(fd: int) -> None:
    """Run the keeper in a fresh interpreter. The descriptor has what `send` returned."""
    global preparing
    with open(fd, "rb") as file:
        order = pickle.load(file)  # noqa: S301
    spec = SpawnSpec(**order["spec"])
    try:
        if order["preparation"]:
            from multiprocessing import spawn

            preparing = True
            spawn.prepare(order["preparation"])
            preparing = False
        call = pickle.loads(order["payload"])  # noqa: S301
    except BaseException as error:  # reported to the caller
        report(spec.status, broken=_failure(error)["traceback"])
        os._exit(1)
    keep(spec, call)
    sys.stdout.flush()
    os._exit(0)
