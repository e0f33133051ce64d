"""The thread: publishes where the main thread is, and answers the agent."""

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

from .. import linux, wire
from ..child import finalization, gloo_groups
from ..collective_check import checker, ledger
from ..debug import debugger, group_timeouts, terminal
from . import exclusive, flight_recorder, sampler, status_slot
from .steps import StepCounter

EVERY = 0.1  # seconds between two looks
SIGNAL = signal.SIGRTMIN + 7  # all stacks, from C: works while Python's lock is held

_PATIENCE = 1.0  # seconds that the script may have to wait for the thread
_GONE = 0.05  # the same, for the kernel to take it away

current: Probe | None = None  # of this process


def prepare() -> None:
    """Before anything else is imported: what is registered first is called last, by every process forked from here."""
    global _prepared
    if not _prepared:
        _prepared = True
        atexit.register(finalization.finalize)
        atexit.register(_teardown)


_prepared = False


def _teardown() -> None:
    if current is not None and current.pid == os.getpid():
        # Python keeps what has ended a script; a code that was given to sys.exit it does not.
        current.teardown(1 if hasattr(sys, "last_type") else 0)


def begin(board: int, slot: int, channel: int, stacks: int) -> list[int]:
    """In a worker that is about to run its script, which runs without a probe as well. Returns where they are now."""
    try:
        memory = linux.shared(board)
    except OSError as error:  # `ulimit -v`, say
        sys.stderr.write(f"phalanx: nobody will see what this process is at: {error}\n")
        for fd in (board, channel, stacks):
            os.close(fd)
        return []
    board, channel, stacks = (_out_of_the_way(fd) for fd in (board, channel, stacks))
    _begin(memory, slot, channel, stacks)
    return [board, channel, stacks]


def _begin(memory: memoryview, slot: int, channel: int, stacks: int) -> None:
    global current
    flight_recorder.begin()
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    prepare()
    probe = current = Probe(status_slot.StatusSlot(memory, slot), socket.socket(fileno=channel))
    os.register_at_fork(before=probe.stop, after_in_child=probe.leave)
    for act in probe.resuming:
        os.register_at_fork(after_in_parent=act)
    atexit.register(probe.end)
    if ledger.kept(memory):
        checker.begin(ledger.CallLedger(memory, slot), slot)
    debugger.lay(probe.say)
    exclusive.lay(probe.stop, probe.start, probe.end)
    probe.start()


def _out_of_the_way(fd: int) -> int:
    """A script gets the same numbers for its files as ever, and may close those above without looking."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = (4096 if soft == resource.RLIM_INFINITY else min(soft, 4096)) - 16
    with contextlib.suppress(OSError):  # there is no room: then where it is
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(high, 3))
        os.close(fd)
        return moved
    os.set_inheritable(fd, False)
    return fd


class Probe:
    def __init__(self, own: status_slot.StatusSlot, channel: socket.socket) -> None:
        self.pid = os.getpid()
        self._channel = channel
        self._known = os.fstat(channel.fileno()).st_ino
        self._steps = StepCounter(own)
        self._sampler = sampler.Sampler(own, SIGNAL)
        self._ended = _thread.allocate_lock()  # held while the thread runs
        self._bell = _thread.allocate_lock()  # held until the thread is to end
        self._over = False  # for good
        self._due = 0.0  # when it is to look again: also if it had to begin anew, for a script that forks all the time
        self._speaks = _thread.allocate_lock()  # one message after the other
        self.thread = 0  # as the kernel knows it
        self._steps.lay()

    @property
    def resuming(self) -> list[Callable[[], Any]]:
        """After a fork. Python 3.13 counts threads when all that was registered for then is done, and warns of them:
        there the main thread does it as soon as it runs any Python again, which this last one is not."""
        if sys.version_info < (3, 13):
            return [self.start]
        self._later = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: self.start() or 0)
        main = threading.main_thread().ident
        return [
            lambda: self.start() if _thread.get_ident() != main else None,
            functools.partial(ctypes.pythonapi.Py_AddPendingCall, self._later, None),
        ]

    # -- by the script's threads

    def start(self) -> None:
        """Not a thread that Python knows of: a script that counts its threads finds its own."""
        if self._over or not self._ended.acquire(blocking=False):
            return
        self._bell.acquire(blocking=False)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no thread to be had
            self._ended.release()
            self._resign()

    def stop(self) -> None:
        """Before a fork, which must not find it in the middle of something, nor at all: Python warns of threads."""
        with contextlib.suppress(RuntimeError):  # two of the script's threads fork at once
            self._bell.release()
        if self._ended.acquire(timeout=_PATIENCE):
            self._ended.release()
            self._see_off()

    def _see_off(self) -> None:
        """The last line of a thread is not its end."""
        thread, self.thread = self.thread, 0
        end = time.monotonic() + _GONE
        while thread and os.path.exists(f"/proc/self/task/{thread}") and time.monotonic() < end:
            time.sleep(0.0001)

    def leave(self) -> None:
        """In a child of the worker, which is none. Its stacks may be asked for all the same: a rank may wait for it."""
        self._over = True
        self._ended = _thread.allocate_lock()  # whoever held it is not here
        atexit.unregister(self.end)  # the page is its parent's
        self._steps.forget()
        debugger.forget()
        self._close()

    def end(self) -> None:
        """Python takes its threads away at the end, wherever they are: in the middle of C++ that is a crash."""
        self._over = True
        self.stop()
        self._resign(over=True)
        gloo_groups.leave()

    def teardown(self, code: int) -> None:
        with contextlib.suppress(Exception):
            self._sampler.teardown(code)

    def _resign(self, *, over: bool = False) -> None:
        """That nobody looks any more must not be taken for a lock of Python's that is held."""
        with contextlib.suppress(Exception):
            debugger.untrace()  # what it is made of goes away piece by piece
            self._sampler.end(over=over)

    def differs(self) -> None:
        """A group of ours has found that ranks call different things, and is about to say so."""
        self.say({"is": "differs", **flight_recorder.everything()})

    def raised(self, trace: TracebackType | None) -> None:
        """An exception about other ranks ends the script."""
        self.say({"is": "raised", **flight_recorder.raised(trace)})

    # -- in a thread of its own

    def _run(self) -> None:
        try:
            self.thread = _thread.get_native_id()
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._watch()
        except Exception:  # what is only shown must not end what is run
            self._resign()
        finally:
            self._ended.release()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        hears = True
        while not self._bell.acquire(timeout=max(0.0, self._due - time.monotonic())):
            self._due = time.monotonic() + EVERY
            if hears and poll.poll(0):
                hears = self._hear()
            self._look()

    def _hear(self) -> bool:
        """False: the agent is gone, and so will we be; or the script has closed it."""
        try:
            received = wire.receive(self._channel) if self._hears else None
        except (OSError, ValueError):
            return False
        if received is None:
            return False
        order, fds = received
        try:
            self._answer(order, fds)
        except Exception as error:  # whoever has asked is told, and what is not asked for is published all the same
            with contextlib.suppress(OSError):
                self.say({"is": "told", "id": order.get("id", 0), "how": "failed", "why": repr(error)[:200]})
        return True

    @property
    def _hears(self) -> bool:
        """The number may be another file's by now: scripts close what they do not know."""
        try:
            return os.fstat(self._channel.fileno()).st_ino == self._known
        except OSError:
            return False

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # a module that is half imported, a group that is taken down
            terminal.tidy()
            self._sampler.publish(time.monotonic_ns())
            gloo_groups.watch()
            if self._sampler.phase not in ("import", "optimizer"):
                self._steps.lay()

    def _answer(self, order: dict[str, Any], fds: list[int]) -> None:
        match order["do"]:
            case "tell":
                told = flight_recorder.everything(self._sampler.still)
                self.say({"is": "told", "id": order["id"], **told})
            case "attach":
                self._beside(order, debugger.attach, socket.socket(fileno=fds.pop()))
            case "interrupt":
                self._beside(order, debugger.interrupt)
            case "listen":
                self._beside(order, debugger.listen, order["port"])
            case "suspend":
                group_timeouts.suspend()
            case "resume":
                group_timeouts.resume()
            case _:
                for fd in fds:
                    os.close(fd)

    def _close(self) -> None:
        """Only what is still ours."""
        if self._hears:
            self._channel.close()
        else:
            self._channel.detach()

    def say(self, message: dict[str, Any], fds: list[int] | tuple[int, ...] = ()) -> None:
        if not self._hears:
            raise BrokenPipeError("nobody listens")
        with self._speaks:
            wire.send(self._channel, message, fds)

    def _beside(self, order: dict[str, Any], act: Callable[..., None], *args: Any) -> None:
        """What takes its time, in a thread of its own, which answers."""

        def answer(message: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):
                self.say({"is": "told", "id": order["id"], **message})

        _thread.start_new_thread(act, (*args, answer))
