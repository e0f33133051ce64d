"""The process between the caller of `spawn` and its ranks: forks them, hosts their store, ends what is left of them.

It is forked from the caller, or a fresh interpreter. In both cases it imports torch once and forks the ranks from
itself, before it has a second thread. It ends them when one fails, when the caller says so, and when that is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
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

ADDRESS = "127.0.0.1"
SETTLE = 0.2  # after a failure, for other ranks to tell theirs: the first cause may be reported second
GRACE = 2.0  # between SIGTERM and SIGKILL
PATIENCE = (
    0.5  # for what ranks had started, and what ends by itself: resource tracker, torch's manager of shared memory
)

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

preparing = False  # a fresh interpreter is importing the caller's script


@dataclass(frozen=True)
class SpawnSpec:
    """What a keeper is told. The descriptors are its ends."""

    caller: int  # pid
    ranks: int
    backend: str | None  # of the process group; "": whichever is right; None: the function makes one, or none
    control: int  # a byte here: stop
    status: int  # a line of JSON for every rank that has ended
    listener: int  # bound already, so that nobody takes the port
    port: int
    pipes: tuple[tuple[int, int, int], ...]  # of each rank: stdout, stderr, what it returns
    theirs: tuple[int, ...] = ()  # the caller's ends, which a fork has as well


def keep(crew: SpawnSpec, call: Call) -> None:
    """Until every rank has ended, and whatever they have left is gone."""
    _leave_the_caller(crew)
    caller = os.pidfd_open(crew.caller)
    if os.getppid() != crew.caller:
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
    for rank in range(crew.ranks):
        process = _fork(crew, rank, call, (caller, woken, wake, *processes))
        # At once: the start of the next one reaps those that have ended already.
        processes[os.pidfd_open(process.pid or 0)] = process
    for fd in (fd for pipes in crew.pipes for fd in pipes):
        os.close(fd)
    # A handler that does nothing, so that the wake-up descriptor is written to.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    store = _host(crew) if hosts else None
    _watch(crew, processes, (crew.control, caller, woken))
    pids = {process.pid for process in processes.values() if process.pid}
    pids |= linux.end_descendants(PATIENCE, GRACE)
    linux.remove_shared_memory(pids)
    del store


def _leave_the_caller(crew: SpawnSpec) -> None:
    """Nothing that the caller set up for itself may happen here: handlers, exit functions, keys of its terminal."""
    for fd in crew.theirs:
        os.close(fd)
    with contextlib.suppress(PermissionError):  # leads a session already
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    atexit._clear()
    _plain_streams()


def _host(crew: SpawnSpec) -> Any:
    """After the forks, because it has a thread. Ranks that come earlier wait in the socket's queue."""
    from torch.distributed import TCPStore

    return TCPStore(ADDRESS, crew.port, is_master=True, wait_for_workers=False, master_listen_fd=crew.listener)


def _fork(crew: SpawnSpec, rank: int, call: Call, ours: tuple[int, ...]) -> BaseProcess:
    # multiprocessing's, and not a bare fork, because it also gives a rank a clean multiprocessing of its own.
    process = multiprocessing.get_context("fork").Process(target=_run, args=(crew, rank, call, os.getpid(), ours))
    process.start()
    return process


def _watch(crew: SpawnSpec, processes: Mapping[int, BaseProcess], stops: tuple[int, ...]) -> None:
    """Until every rank has ended, by itself or because another one failed, or because they were stopped."""
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
                tell(crew.status, rank=key.data, code=code, time=time.time(), stopped=asked)
                if code and not failed:
                    failed, stop_at = True, time.monotonic() + SETTLE
            if time.monotonic() >= stop_at and alive:
                for process in alive.values():
                    process.kill() if asked else process.terminate()
                asked, stop_at = True, time.monotonic() + GRACE


def tell(status: int, **what: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, json.dumps(what).encode() + b"\n")


# -- in a rank


def _run(crew: SpawnSpec, rank: int, call: Call, keeper: int, ours: tuple[int, ...]) -> None:
    linux.die_with_parent(keeper)
    result = _settle(crew, rank, ours)
    os.environ.update(_environment(crew, rank))
    function, args, kwargs = call
    failed = False
    try:
        _calm()
        with _group(crew.backend):
            value = function(*args, **kwargs)
        answer = _packed(value)
    except SystemExit as error:
        failed = error.code not in (None, 0)
        # `phalanx.main` has told its error already, and leaves by an exit that has it as its cause.
        answer = _failure(error.__cause__ or error) if failed else _packed(None)
    except BaseException as error:
        failed = True
        answer = _failure(error)
    with contextlib.suppress(BrokenPipeError), open(result, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    atexit._run_exitfuncs()
    raise SystemExit(1 if failed or "error" in answer else 0)


def _settle(crew: SpawnSpec, rank: int, ours: tuple[int, ...]) -> int:
    """Streams of its own, and none of the descriptors that are for others. Returns where the result goes."""
    out, err, result = crew.pipes[rank]
    for number, fd in ((1, out), (2, err)):
        os.dup2(fd, number)
    _plain_streams()
    for fd in {fd for pipes in crew.pipes for fd in pipes} - {result}:
        os.close(fd)
    for fd in (crew.control, crew.status, crew.listener, *ours):
        os.close(fd)
    return result


_former: list[Any] = []  # kept, for its end would close what it writes to


def _plain_streams() -> None:
    """A notebook's are objects that send to threads which are not here, and may have locks that these held."""
    _former.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = _writer(1), _writer(2)
    setattr(sys, "__stdout__", sys.stdout)  # noqa: B010
    setattr(sys, "__stderr__", sys.stderr)  # noqa: B010


def _writer(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _environment(crew: SpawnSpec, rank: int) -> dict[str, str]:
    """As under `phalanx run` on one node, with a store that is there already."""
    for name in [*os.environ]:
        if name in (RUN, RUN_FOLDER, MEMORY, TOPOLOGY) or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    member = WorkerVariables(
        rank=rank,
        world_size=crew.ranks,
        local_rank=rank,
        local_world_size=crew.ranks,
        node=0,
        nodes=1,
        role="default",
        run_id=f"spawn-{crew.caller}",
        run="",
        run_folder="",
        address=ADDRESS,
        port=crew.port,
        attempt=0,
        max_restarts=0,
        error_file="",
        signals="",
    )
    found = {name: value for name, value in worker_environment(member, os.environ).items() if value}
    if crew.ranks > 1 and THREADS not in os.environ:
        found[THREADS] = "1"
    # Everybody is on this machine, whatever its name resolves to.
    return found | {name: form.format("lo") for name, form in INTERFACES.items() if name not in os.environ}


def _calm() -> None:
    """What a fork would share: the state of random generators. And as many threads as the environment says."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
        threads = os.environ.get(THREADS, "")
        if threads.isdecimal() and int(threads):
            torch.set_num_threads(int(threads))  # the variable is read when torch is imported, which was long ago


@contextlib.contextmanager
def _group(backend: str | None) -> Any:
    """The process group that was asked for; none, if the function is to make it."""
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
    if not torch.cuda.is_available() or torch.cuda.device_count() < size:  # NCCL wants a GPU for each
        return "gloo" if torch.cuda.is_available() else device.SHM  # gloo takes tensors of a GPU too
    torch.cuda.set_device(rank)
    return device.BOTH


def _packed(value: Any) -> dict[str, Any]:
    try:
        return {"value": pickle.dumps(value)}
    except Exception as error:
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
    with contextlib.suppress(Exception):
        answer["exception"] = pickle.dumps(error)
    return answer


# -- in a fresh interpreter


def send(crew: SpawnSpec, payload: bytes, preparation: dict[str, Any] | None) -> bytes:
    """What `main` reads. Our own words to our own child: as trustworthy as the function itself."""
    return pickle.dumps({"crew": asdict(crew), "payload": payload, "preparation": preparation})


def main(fd: int) -> None:
    """The order is in this descriptor."""
    global preparing
    with open(fd, "rb") as file:
        order = pickle.load(file)  # noqa: S301
    crew = SpawnSpec(**order["crew"])
    try:
        if order["preparation"]:
            from multiprocessing import spawn

            preparing = True
            spawn.prepare(order["preparation"])
            preparing = False
        call = pickle.loads(order["payload"])  # noqa: S301
    except BaseException as error:
        tell(crew.status, broken=_failure(error)["traceback"])
        os._exit(1)
    keep(crew, call)
    sys.stdout.flush()
    os._exit(0)
