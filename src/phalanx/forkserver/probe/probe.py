"""The probe: a thread that publishes the position of the main thread, and answers the agent."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .. import linux, log, wire
from ..board import ledger, status_slot
from ..child import finalization, gloo_groups, setup
from ..collective_check import checker
from ..debug import debugger, group_timeouts, terminal
from . import exclusive, report, sampler
from .steps import StepCounter

INTERVAL = 0.1  # seconds between two samples
SIGNAL = signal.SIGRTMIN + 7  # prints all stacks, from C: works while the GIL is held

_STOP_TIMEOUT = 1.0  # seconds that the script may have to wait for the thread to end
_EXIT_TIMEOUT = 0.05  # seconds for the kernel to remove it

current: Probe | None = None  # of this process


def prepare() -> None:
    """Register exit functions, before anything else is imported. The first to be registered runs last, in all forked
    processes.
    """
    global _prepared
    if not _prepared:
        _prepared = True
        atexit.register(finalization.finalize)
        atexit.register(_teardown)


_prepared = False


def _teardown() -> None:
    if current is not None and current.pid == os.getpid():
        # Python keeps the exception that ended a script, but not a code that was passed to sys.exit.
        current.teardown(1 if hasattr(sys, "last_type") else 0)


def begin(board: int, slot: int, channel: int, stacks: int) -> list[int]:
    """Start the probe of a worker that is about to run its script. Return the new descriptors; empty: it runs without a
    probe.
    """
    try:
        memory = linux.shared(board)
    except OSError as error:  # for example `ulimit -v`
        sys.stderr.write(f"phalanx: this process runs without a probe, and its state is not shown: {error}\n")
        for fd in (board, channel, stacks):
            os.close(fd)
        return []
    board, channel, stacks = (_move_high(fd) for fd in (board, channel, stacks))
    _begin(memory, slot, channel, stacks)
    return [board, channel, stacks]


def _begin(memory: memoryview, slot: int, channel: int, stacks: int) -> None:
    global current
    report.remember_store()
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    prepare()
    probe = current = Probe(status_slot.StatusSlot(memory, slot), socket.socket(fileno=channel))
    os.register_at_fork(before=probe.stop, after_in_child=probe.detach)
    for act in probe.restart_hooks:
        os.register_at_fork(after_in_parent=act)
    atexit.register(probe.end)
    if ledger.is_enabled(memory):
        checker.begin(ledger.CallLedger(memory, slot), slot)
    setup.exception_reporter = probe.report_exception
    debugger.install(probe.send)
    exclusive.install(probe.stop, probe.start, probe.end)
    probe.start()


def _move_high(fd: int) -> int:
    """Move a descriptor to a high number: a script's files get the usual numbers, and a script may close the numbers
    above them blindly.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = (4096 if soft == resource.RLIM_INFINITY else min(soft, 4096)) - 16
    with contextlib.suppress(OSError):  # no number is free: leave it where it is
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(high, 3))
        os.close(fd)
        return moved
    os.set_inheritable(fd, False)
    return fd


class Probe:
    """The probe of this process. Its thread samples and answers; the other methods run in the script's threads."""

    def __init__(self, own: status_slot.StatusSlot, channel: socket.socket) -> None:
        self.pid = os.getpid()
        self._channel = channel
        self._inode = os.fstat(channel.fileno()).st_ino
        self._steps = StepCounter(own)
        self._sampler = sampler.Sampler(own, SIGNAL)
        self._running = _thread.allocate_lock()  # held while the thread runs
        self._stop_lock = _thread.allocate_lock()  # held until the thread should end
        self._closed = False  # ended permanently
        self._next_sample = 0.0  # kept across restarts of the thread: a script may fork often
        self._send_lock = _thread.allocate_lock()  # one message at a time
        self.thread = 0  # the kernel's id
        self._steps.install()

    @property
    def restart_hooks(self) -> list[Callable[[], Any]]:
        """Functions that start the thread again after a fork. Python 3.13 counts threads after all functions registered
        for that have run, and warns. There the main thread starts it as soon as it runs Python code again.
        """
        if sys.version_info < (3, 13):
            return [self.start]
        self._pending_call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: self.start() or 0)
        main = threading.main_thread().ident
        return [
            lambda: self.start() if _thread.get_ident() != main else None,
            functools.partial(ctypes.pythonapi.Py_AddPendingCall, self._pending_call, None),
        ]

    # -- in the script's threads

    def start(self) -> None:
        """Start the thread. Python does not list it: a script that counts its threads finds only its own."""
        if self._closed or not self._running.acquire(blocking=False):
            return
        self._stop_lock.acquire(blocking=False)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no thread available
            self._running.release()
            self._publish_end()

    def stop(self) -> None:
        """End the thread before a fork. A fork must not interrupt it, and Python warns if a second thread exists."""
        with contextlib.suppress(RuntimeError):  # two threads of the script fork at once
            self._stop_lock.release()
        if self._running.acquire(timeout=_STOP_TIMEOUT):
            self._running.release()
            self._wait_for_exit()

    def _wait_for_exit(self) -> None:
        """Wait until the kernel has removed the thread."""
        thread, self.thread = self.thread, 0
        end = time.monotonic() + _EXIT_TIMEOUT
        while thread and os.path.exists(f"/proc/self/task/{thread}") and time.monotonic() < end:
            time.sleep(0.0001)

    def detach(self) -> None:
        """Detach in a child of the worker, which is not a worker. Its stacks can still be requested: a rank may wait
        for it.
        """
        self._closed = True
        self._running = _thread.allocate_lock()  # the thread that held it does not exist here
        atexit.unregister(self.end)  # the status slot belongs to its parent
        self._steps.detach()
        debugger.detach()
        self._close()

    def end(self) -> None:
        """End the thread at exit. Python would end it anywhere, which crashes in the middle of C++ code."""
        self._closed = True
        self.stop()
        self._publish_end(over=True)
        gloo_groups.keep_all()

    def teardown(self, code: int) -> None:
        """Publish that Python's atexit functions have returned."""
        try:
            self._sampler.teardown(code)
        except Exception:
            log.swallowed("forkserver.probe.probe")

    def _publish_end(self, *, over: bool = False) -> None:
        """Publish that the probe has ended, so that the age of the slot is not mistaken for a held GIL."""
        try:
            debugger.untrace()  # its parts are being torn down
            self._sampler.end(over=over)
        except Exception:
            log.swallowed("forkserver.probe.probe")

    def report_mismatch(self) -> None:
        """Report that a group has detected different calls of its ranks, before it raises."""
        self.send({"is": "mismatch", **report.full()})

    def report_exception(self, trace: TracebackType | None) -> None:
        """Report that an exception about other ranks ends the script."""
        self.send({"is": "raised", **report.of_exception(trace)})

    # -- in the probe's thread

    def _run(self) -> None:
        try:
            self.thread = _thread.get_native_id()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._watch()
        except Exception:  # a failing probe must not end the script
            log.swallowed("forkserver.probe.probe")
            self._publish_end()
        finally:
            self._running.release()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        connected = True
        while not self._stop_lock.acquire(timeout=max(0.0, self._next_sample - time.monotonic())):
            self._next_sample = time.monotonic() + INTERVAL
            if connected and poll.poll(0):
                connected = self._handle_request()
            self._sample()

    def _handle_request(self) -> bool:
        """Handle one request. Return False if the agent has ended, or if the script has closed the channel."""
        try:
            received = wire.receive(self._channel) if self._connected else None
        except (OSError, ValueError):
            return False
        if received is None:
            return False
        request, fds = received
        try:
            self._answer(request, fds)
        except Exception as error:  # answer with the error, and keep publishing
            log.swallowed("forkserver.probe.probe")
            with contextlib.suppress(OSError):
                self.send({"is": "answer", "id": request.get("id", 0), "how": "failed", "why": repr(error)[:200]})
        return True

    @property
    def _connected(self) -> bool:
        """Whether the descriptor is still the channel: scripts may close descriptors they did not open."""
        try:
            return os.fstat(self._channel.fileno()).st_ino == self._inode
        except OSError:
            return False

    def _sample(self) -> None:
        try:
            terminal.end_stale_session()
            self._sampler.publish(time.monotonic_ns())
            gloo_groups.install()
            if self._sampler.phase not in ("import", "optimizer"):
                self._steps.install()
        except Exception:  # a module that is half imported, a group that is being destroyed
            log.swallowed("forkserver.probe.probe")

    def _answer(self, request: dict[str, Any], fds: list[int]) -> None:
        match request["do"]:
            case "report":
                self.send({"is": "answer", "id": request["id"], **report.full(self._sampler.still)})
            case "attach":
                self._in_thread(request, debugger.attach, socket.socket(fileno=fds.pop()))
            case "interrupt":
                self._in_thread(request, debugger.interrupt)
            case "listen":
                self._in_thread(request, debugger.listen, request["port"])
            case "suspend":
                group_timeouts.suspend()
            case "resume":
                group_timeouts.resume()
            case _:
                for fd in fds:
                    os.close(fd)

    def _close(self) -> None:
        """Close the channel if it is still ours."""
        if self._connected:
            self._channel.close()
        else:
            self._channel.detach()

    def send(self, message: dict[str, Any], fds: list[int] | tuple[int, ...] = ()) -> None:
        """Send a message to the agent. Raises OSError if it has ended."""
        if not self._connected:
            raise BrokenPipeError("the channel to the agent is closed")
        with self._send_lock:
            wire.send(self._channel, message, fds)

    def _in_thread(self, request: dict[str, Any], act: Callable[..., None], *args: Any) -> None:
        """Run `act` in a separate thread, because it is slow. The thread sends the answer."""

        def answer(message: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):
                self.send({"is": "answer", "id": request["id"], **message})

        _thread.start_new_thread(act, (*args, answer))
