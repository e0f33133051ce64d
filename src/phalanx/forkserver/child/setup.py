"""A new child, until it is an ordinary process: session, streams, environment, randomness."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import linux

ChildSpec = dict[str, Any]


# What a scheduler may send to every process of a job.
SCHEDULERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def default_signals() -> None:
    """What ends a worker must not be ignored because the shell ignored it: nohup does, and so does `&` in a script.

    torchrun's workers have it so, because torchrun handles these itself.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Parent(NamedTuple):
    """What a child has to know of the fork server."""

    pid: int
    dispositions: Mapping[int, Any]  # of signals, before the fork server took them
    mask: set[int]


def settle(order: ChildSpec, fds: list[int], parent: Parent) -> None:
    """First thing in the child. From here on nothing of the fork server's is left but its modules."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, disposition in parent.dispositions.items():
        signal.signal(number, disposition)
    os.setsid()
    linux.die_with_parent(parent.pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, parent.mask)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    if order.get("cwd"):
        os.chdir(order["cwd"])
    if order.get("umask") is not None:
        os.umask(order["umask"])
    if order.get("cores"):
        os.sched_setaffinity(0, order["cores"])


def dress(order: ChildSpec) -> None:
    """What a fresh interpreter would have found: its environment, its arguments, a random state of its own."""
    environ = order["environ"]
    for name in [name for name in os.environ if name not in environ]:
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.argv[1:] = order["args"]
    if sys.orig_argv != order["command"]:
        sys.orig_argv[:] = order["command"]
        linux.set_command_line(order["command"])
    for stream, mode in ((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb")):
        if stream is not None:
            _reopen(stream, mode)
    _reseed()
    if "LD_PRELOAD" not in environ:  # a profiler loaded that way writes what it has found at the very end
        linux.leave_what_was_loaded()
    record_exceptions(order["environ"].get("TORCHELASTIC_ERROR_FILE", ""))


def _reopen(stream: Any, mode: str) -> None:
    """The same stream on what its descriptor is now: Python looks only once whether one can seek in a file."""
    raw: Any = io.FileIO(stream.fileno(), mode, closefd=False)
    raw.name = stream.name
    through = stream.write_through
    buffer: Any = raw
    if isinstance(stream.buffer, io.BufferedIOBase):
        buffer = io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering or (not through and raw.isatty()),
        write_through=through,
    )


def _reseed() -> None:
    """What a process draws when it starts and a fork would share. Python's own generator reseeds itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    if "threading" in sys.modules:  # it still has the number that the kernel gave the fork server's
        sys.modules["threading"].main_thread()._set_native_id()


def record_exceptions(path: str) -> None:
    """An exception that ends the script is also written to `path`, in torchrun's form, with the exact time."""
    plain = sys.excepthook

    def excepthook(kind: Any, value: Any, trace: Any) -> None:
        from . import error_file

        if trace is not None and trace.tb_frame.f_globals is _hidden:
            trace = trace.tb_next
            value = value.with_traceback(trace)
        if path:
            error_file.write(path, kind, value, trace)
        error_file.tell(value, trace)
        plain(kind, value, trace)

    # Both names, so that a library which asks "has somebody replaced the hook?" is told no.
    sys.excepthook = sys.__excepthook__ = excepthook


_hidden: dict[str, Any] | None = None


def hide_frames_of(namespace: dict[str, Any]) -> None:
    """Tracebacks begin with the script: the frame of this module, at the bottom of the stack, is left out."""
    global _hidden
    _hidden = namespace


def hook(order: ChildSpec, fds: list[int]) -> None:
    """The interpreter that is executed has a probe too: hook/sitecustomize.py begins it, and hides all this."""
    environ = order["environ"]
    if "PYTHONPATH" in environ:
        environ["PHALANX_PYTHONPATH"] = environ["PYTHONPATH"]
    environ["PYTHONPATH"] = os.pathsep.join([order["hook"], *filter(None, [environ.get("PYTHONPATH")])])
    environ["PHALANX_PROBE"] = ":".join(map(str, [order["probe"], *fds, order.get("path0") or ""]))
    for fd in fds:
        os.set_inheritable(fd, True)


def execute(order: ChildSpec) -> None:
    """Become another program; does not return."""
    command = order["exec"]
    try:
        os.execvpe(command[0], command, order["environ"])
    except OSError as error:
        os.write(2, f"phalanx: cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
