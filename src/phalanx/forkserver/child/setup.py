"""Turns a forked child into an ordinary process: session, streams, environment, random state."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from .. import hidden_modules, linux, log
from . import exit_calls

ChildSpec = dict[str, Any]

exception_reporter: Callable[[TracebackType | None], None] | None = None  # of the probe of this process


# Signals that a scheduler may send to every process of a job.
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def default_signals() -> None:
    """Restore signals that the shell ignored, as nohup and `&` in a script do: these signals must be able to end a
    worker.

    torchrun restores them too, because it handles these signals itself.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Parent(NamedTuple):
    """What a child needs to know about the fork server."""

    pid: int
    dispositions: Mapping[int, Any]  # of signals, before the fork server handled them
    mask: set[int]


def detach(spec: ChildSpec, fds: list[int], parent: Parent) -> None:
    """Detach from the fork server. The first call in the child; only the imported modules remain."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, disposition in parent.dispositions.items():
        signal.signal(number, disposition)
    os.setsid()
    linux.die_with_parent(parent.pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, parent.mask)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    if spec.get("cwd"):
        os.chdir(spec["cwd"])
    if spec.get("umask") is not None:
        os.umask(spec["umask"])
    if spec.get("cores"):
        os.sched_setaffinity(0, spec["cores"])


def apply_spec(spec: ChildSpec) -> None:
    """Set up what a fresh interpreter has: environment, arguments, streams, random state."""
    environ = spec["environ"]
    for name in [name for name in os.environ if name not in environ]:
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.argv[1:] = spec["args"]
    if sys.orig_argv != spec["command"]:
        sys.orig_argv[:] = spec["command"]
        linux.set_command_line(spec["command"])
    for stream, mode in ((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb")):
        if stream is not None:
            _reopen(stream, mode)
    log.configure()  # a warm fork server has the environment of another command
    _reseed()
    if "LD_PRELOAD" not in environ:  # a profiler loaded this way writes its results at the very end
        linux.skip_destructors()
    record_exceptions(spec["environ"].get("TORCHELASTIC_ERROR_FILE", ""))


def _reopen(stream: Any, mode: str) -> None:
    """Reopen a stream on its new descriptor: Python checks only once whether a file is seekable."""
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
    """Reseed generators whose state a fork would share. Python's own generator reseeds itself."""
    # None: a program that forbids the import
    if (random := hidden_modules.find("numpy.random")) is not None:
        random.seed()
    if (torch := hidden_modules.find("torch")) is not None:
        torch.default_generator.seed()
    if (process := hidden_modules.find("multiprocessing.process")) is not None:
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    if (threading := hidden_modules.find("threading")) is not None:  # it still has the fork server's thread id
        threading.main_thread()._set_native_id()


def record_exceptions(path: str) -> None:
    """Write the exception that ends the script to `path`, too, in torchrun's format with the exact time."""
    plain = sys.excepthook
    pid = os.getpid()

    def excepthook(kind: Any, value: Any, trace: Any) -> None:
        from . import error_file

        if trace is not None and trace.tb_frame.f_globals is _hidden:
            trace = trace.tb_next
            value = value.with_traceback(trace)
        text = _printed(plain, kind, value, trace)
        if path:
            error_file.write(path, kind, value, trace, text)
            if os.getpid() == pid and text:  # not of a fork of the script
                error_file.write_printed(path, text)
        error_file.report(value, trace, exception_reporter)
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            plain(kind, value, trace)

    # Set both names, so that a library which checks whether the hook was replaced finds that it was not.
    sys.excepthook = sys.__excepthook__ = excepthook
    if path:
        exit_calls.record(path)


class _Buffer(io.StringIO):
    """Receives a traceback. It has the descriptor of stderr, which Python uses to decide about colours."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return bool(self._stream.isatty())


def _printed(plain: Any, kind: Any, value: Any, trace: Any) -> str:
    """Return the text that the hook prints. Empty if it cannot be determined."""
    stream = sys.stderr
    if stream is None:
        return ""
    try:
        sys.stderr = buffer = _Buffer(stream)
        try:
            plain(kind, value, trace)
        finally:
            sys.stderr = stream
        return buffer.getvalue()
    except Exception:
        log.swallowed("forkserver.child.setup")
        return ""


_hidden: dict[str, Any] | None = None


def hide_frames_of(namespace: dict[str, Any]) -> None:
    """Hide this module's frame at the bottom of the stack: tracebacks begin with the script."""
    global _hidden
    _hidden = namespace


def add_probe_hook(spec: ChildSpec, fds: list[int]) -> None:
    """Give a probe to an interpreter that is executed: hook/sitecustomize.py starts it and removes all traces of it."""
    environ = spec["environ"]
    if "PYTHONPATH" in environ:
        environ["PHALANX_PYTHONPATH"] = environ["PYTHONPATH"]
    environ["PYTHONPATH"] = os.pathsep.join([spec["hook"], *filter(None, [environ.get("PYTHONPATH")])])
    environ["PHALANX_PROBE"] = ":".join(map(str, [spec["probe"], *fds, spec.get("path0") or ""]))
    if spec.get("kept"):
        with open(os.memfd_create("kept", 0), "wb", closefd=False) as file:  # for imports/kept_sources.py
            file.write(json.dumps({name: spec[name] for name in ("kept", "command", "path0")}).encode())
            environ["PHALANX_KEPT"] = str(file.fileno())
    for fd in fds:
        os.set_inheritable(fd, True)


def execute(spec: ChildSpec) -> None:
    """Execute another program. Does not return."""
    command = spec["exec"]
    try:
        os.execvpe(command[0], command, spec["environ"])  # noqa: S606
    except OSError as error:
        os.write(2, f"phalanx: cannot run {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
