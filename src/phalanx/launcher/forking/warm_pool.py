"""Fork servers kept between runs: finds one that matches this environment, starts and stops them.

A warm fork server may only serve runs with exactly the same imports. So its name is a digest of everything that
matters: interpreter, installed packages, the variables that imports read, limits and cgroup.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LaunchError
from phalanx.forkserver import linux, wire
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.version import __version__

MODULES = ("torch", "torch.distributed", "torch._dynamo")

_FOLDER = os.path.dirname(os.path.abspath(wire.__file__))
_STOPPED = 3.0  # seconds for which a warm fork server may be stopped (SIGSTOP)
_INTERVAL = 0.5  # seconds between two checks of its state

# Prefixes of variables that libraries read on import. CUDA_VISIBLE_DEVICES is read when CUDA starts.
_READ_BY_IMPORTS = tuple(
    """
    PYTHON TORCH PYTORCH OMP_ MKL_ OPENBLAS_ BLIS_ KMP_ GOMP_ NUMEXPR_ ATEN_ NPY_ NUMPY_ TRITON_ HF_ TRANSFORMERS_
    CUDA_ CUDNN_ CUBLAS_ NCCL_ GLOO_ TP_ ROCM HIP_ HSA_ XLA_ LD_ MALLOC_ GLIBC_ LANG LC_ HOME XDG_ TMPDIR VIRTUAL_ENV
    CONDA_
    """.split()  # noqa: SIM905
)
_NOT_READ = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_")


@dataclass(frozen=True)
class WarmPool:
    """The files of the warm fork server for one environment."""

    folder: str
    key: str

    @property
    def socket(self) -> str:
        """Return the path of its socket."""
        return os.path.join(self.folder, f"{self.key}.sock")

    @property
    def log(self) -> str:
        """Return the path of its log."""
        return os.path.join(self.folder, f"{self.key}.log")


def place(base: str, python: str, environ: Mapping[str, str]) -> WarmPool:
    """Return the files for an interpreter and environment."""
    digest = hashlib.sha256()
    for part in _identity(python, environ):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return WarmPool(os.path.join(base, "warm"), digest.hexdigest()[:16])


def _identity(python: str, environ: Mapping[str, str]) -> Iterator[str]:
    yield f"{__version__} {python} {os.path.realpath(python)} {sys.version} {os.getuid()}"
    for name in sorted(environ):
        if name.startswith(_READ_BY_IMPORTS) and not name.startswith(_NOT_READ):
            yield f"{name}={environ[name]}"
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        with contextlib.suppress(OSError):
            yield folder
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                yield f"{entry.name} {entry.stat().st_mtime_ns}"
    for limit in ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_STACK", "RLIMIT_MEMLOCK", "RLIMIT_NPROC"):
        yield f"{limit} {resource.getrlimit(getattr(resource, limit))}"
    yield f"{os.getpriority(os.PRIO_PROCESS, 0)} {sorted(os.sched_getaffinity(0))}"
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        yield file.read()
    for space in ("mnt", "net", "pid", "ipc"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/ns/{space}")


def find(
    pool: WarmPool, required: Sequence[str], keep: float = 0.0, meanwhile: Callable[[], None] = lambda: None
) -> ForkServerClient | str | None:
    """Return a fork server for this run, or why the existing one cannot be used, or None if there is none.

    `meanwhile` is called if there is one, while it checks for changed files and forks.
    """
    sock = _connect(pool.socket)
    if sock is None:
        return None
    try:
        wire.send(sock, {"do": "hello", "required": list(required), "keep": keep})
        meanwhile()
        answer = _answer(sock)
    except (OSError, ValueError):
        answer = None
    if answer is None or answer["is"] != "ready":
        sock.close()
        return "it did not answer" if answer is None else str(answer["why"])
    return ForkServerClient(sock, "warm", ready=answer)


def start(pool: WarmPool, python: str, environ: Mapping[str, str], modules: Sequence[str], idle: float) -> None:
    """Start a warm fork server and return once it listens. It is still importing: clients wait for that."""
    try:
        os.makedirs(pool.folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot keep a fork server warm in {pool.folder}: {error.strerror}",
            fix="set PHALANX_HOME to a writable folder",
        ) from error
    with contextlib.suppress(FileNotFoundError):
        os.unlink(pool.socket)
    with socket.socket(socket.AF_UNIX) as listener, _short(pool.socket) as path:
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(16)
        line = [python, "-u", os.path.join(_FOLDER, "warm_main.py"), str(listener.fileno()), pool.socket, str(idle)]
        with open(pool.log, "wb") as log:
            subprocess.Popen(
                [*line, ",".join(modules), " " * 2048],
                env=dict(environ),
                cwd="/",  # so that a user's disk can be unmounted
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )


def status(path: str) -> wire.Message | None:
    """Return the status of the fork server at a socket. None if there is none."""
    return _ask(path, {"do": "status"})


def stop(path: str) -> wire.Message | None:
    """End the fork server at a socket; one that is stopped (SIGSTOP) continues, to end as any other."""
    return _ask(path, {"do": "quit"}, wake=True)


def sockets(base: str) -> list[str]:
    """Return the sockets of all warm fork servers."""
    folder = os.path.join(base, "warm")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if name.endswith(".sock")]


def _ask(path: str, request: wire.Message, *, wake: bool = False) -> wire.Message | None:
    sock = _connect(path)
    if sock is None:
        return None
    with sock, contextlib.suppress(OSError, ValueError):
        wire.send(sock, request)
        if wake:
            os.kill(linux.peer(sock).pid, signal.SIGCONT)
        return _answer(sock)
    return None


def _answer(sock: socket.socket) -> wire.Message | None:
    """Wait for the answer of a warm fork server, while it imports. None: it has ended, or is stopped."""
    pid, stopped = linux.peer(sock).pid, 0.0
    while not select.select([sock], [], [], _INTERVAL)[0]:
        stopped = stopped + _INTERVAL if linux.state(pid) == "stopped" else 0.0
        if stopped >= _STOPPED:
            return None
    received = wire.receive(sock)
    return None if received is None else received[0]


def _connect(path: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX)
    try:
        if os.stat(path).st_uid != os.getuid():
            raise LaunchError(f"{path} belongs to another user", fix=f"rm {path}")
        with _short(path) as short:
            sock.connect(short)
        if not linux.peer(sock).is_same_user:  # the socket may have been replaced meanwhile
            raise LaunchError(f"a process of another user listens on {path}", fix=f"rm {path}")
    except OSError:
        sock.close()
        return None
    except LaunchError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """Yield a short path to a socket, through a descriptor of its folder: Unix allows at most 107 bytes."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)
