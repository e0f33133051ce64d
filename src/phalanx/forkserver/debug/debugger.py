"""Attaches a debugger to this worker: pdb where its main thread is, or debugpy for an IDE."""

from __future__ import annotations

import _thread
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import linux, log, thread_frames
from . import breakpoints, terminal
from .terminal import Send, TerminalStream

SIGNAL = signal.SIGRTMIN + 8  # makes the main thread enter the debugger

_RESPONSE_TIMEOUT = 1.0  # seconds for the main thread to respond; else it is in native code
_LONGEST_RESPONSE = 4.0  # the same if it gets no core; the agent waits longer
_RESPONSE_INTERVAL = 0.1  # seconds between two checks whether it had a core
_TURN_TIMEOUT = 0.2  # seconds for a session that is just ending
_UNAVAILABLE = (
    "step",
    "s",
    "next",
    "n",
    "until",
    "unt",
    "return",
    "r",
    "jump",
    "j",
    "break",
    "b",
    "tbreak",
    "run",
    "restart",
)

Answer = Callable[[dict[str, Any]], None]

_DEBUGGERS = ("bdb", "pdb", "cmd", __name__, terminal.__name__)
_callers: list[tuple[socket.socket, Any]] = []  # socket, and a lock to release once the main thread has responded
_interrupts: list[Any] = []  # locks, as above
_debugpy_address: tuple[str, int] | None = None  # where debugpy listens


def install(send: Send) -> None:
    """Install the signal handler and patch pdb. Call it in the main thread, before the script."""
    terminal.connect(send)
    signal.signal(SIGNAL, _on_signal)
    breakpoints.install()


def detach() -> None:
    """Detach in a child of the worker: it has no channel, and must not use the terminal of its parent."""
    untrace()
    terminal.connect(None)


def untrace() -> None:
    """Stop tracing for a debugger that was attached here."""
    tracer = getattr(sys.gettrace(), "__self__", None)
    if isinstance(getattr(tracer, "stdin", None), TerminalStream):
        sys.settrace(None)


def attach(sock: socket.socket, answer: Answer) -> None:
    """Attach pdb to the main thread. Runs in a separate thread."""
    if not _is_open(sock):  # the other side has given up, because the GIL was held
        sock.close()
        return
    if not terminal.acquire_turn(_TURN_TIMEOUT):
        sock.close()
        answer({"how": "busy"})
        return
    try:
        import pdb

        if signal.getsignal(SIGNAL) is not _on_signal:
            raise RuntimeError(f"the script uses signal {SIGNAL} for something else")

        responded = _thread.allocate_lock()
        responded.acquire()
        _callers.append((sock, responded))
        signal.pthread_kill(terminal.main(), SIGNAL)
        stopped = _responds(responded) or not _withdraw()
    except Exception as error:  # the main thread has ended, or pdb is not Python's
        log.swallowed("forkserver.debug.debugger")
        _withdraw()
        terminal.release_turn()
        sock.close()
        answer({"how": "failed", "why": f"{type(error).__name__}: {error}"})
        return
    if stopped:
        answer({"how": "stopped"})
    else:
        _look_beside(pdb, sock, answer)


def _withdraw() -> bool:
    """Withdraw a request. Return False if the main thread has just responded."""
    try:
        _callers.pop()
    except IndexError:
        return False
    return True


def _responds(responded: Any) -> bool:
    """Return whether the main thread responds. Time in which it waits for a core does not count: on a busy machine that
    may be seconds.
    """
    begun, had = time.monotonic(), 0.0
    while had < _RESPONSE_TIMEOUT and time.monotonic() - begun < _LONGEST_RESPONSE:
        before = linux.thread(os.getpid())
        if responded.acquire(timeout=_RESPONSE_INTERVAL):
            return True
        after = linux.thread(os.getpid())
        if before is None or after is None or after[0]:  # asleep: its signal would have woken it
            had += _RESPONSE_INTERVAL
        else:
            had += after[1] - before[1]
    return False


def interrupt(answer: Answer) -> None:
    """Handle Ctrl-C at the terminal of a debugger. Runs in a separate thread."""
    session = terminal.session()
    if session is None or session.thread != terminal.main():
        answer({"came": True})  # only a prompt is active
        return
    responded = _thread.allocate_lock()
    responded.acquire()
    _interrupts.append(responded)
    signal.pthread_kill(terminal.main(), SIGNAL)
    answer({"came": _responds(responded)})


def _on_signal(_: int, frame: FrameType | None) -> None:
    """Handle the signal. Runs in the main thread wherever it is in Python, also in a sleep or while it waits for a
    lock.
    """
    session = terminal.session()
    if _callers:
        sock, responded = _callers.pop()
        responded.release()
        stream = TerminalStream(sock)
        try:
            pdb = _attached_class()(stream)
        # A .pdbrc that cannot be read must not fail the script. Not logged: this is a signal handler, which may have
        # interrupted `logging` itself.
        except Exception:
            terminal.begin(None, stream, waits=False).end()
            return
        terminal.begin(pdb, pdb.stdin, waits=False)
        _break_in(pdb, frame)
    elif _interrupts:
        while _interrupts:
            _interrupts.pop().release()
        if session is None or session.thread != terminal.main():
            return
        if not session.prompts:
            session.pdb.message("\nInterrupted. (Use 'cont' to resume).")
            _break_in(session.pdb, frame)
        elif session.pdb.allow_kbdint:
            raise KeyboardInterrupt


def _break_in(pdb: Any, frame: FrameType | None) -> None:
    """Stop here. `Pdb.set_trace` would stop at the next line, after a sleep has finished."""
    sys.settrace(None)  # do not trace the debugger itself
    while frame is not None and frame.f_back is not None and frame.f_globals.get("__name__") in _DEBUGGERS:
        frame = frame.f_back
    pdb.reset()
    outer = frame
    while outer is not None:
        outer.f_trace = pdb.trace_dispatch
        pdb.botframe = outer
        outer = outer.f_back
    pdb.set_step()
    pdb.interaction(frame, None)
    if not pdb.quitting and (pdb.stoplineno != -1 or pdb.breaks):
        sys.settrace(pdb.trace_dispatch)


def _attached_class() -> Any:
    import pdb

    class AttachedPdb(pdb.Pdb):
        def __init__(self, stream: TerminalStream) -> None:
            super().__init__(stdin=stream, stdout=stream, nosigint=True, skip=[__name__])  # type: ignore[arg-type]

        def interaction(self, *args: Any, **named: Any) -> None:
            session = terminal.session()
            if session is None:
                return
            session.prompts += 1
            try:
                super().interaction(*args, **named)
            finally:
                session.prompts -= 1
                if self.quitting or (self.stoplineno == -1 and not self.breaks):
                    session.end()

        def do_quit(self, arg: str) -> bool | None:  # noqa: ARG002
            """q(uit): leave the debugger. The rank continues."""
            self.clear_all_breaks()
            self.set_continue()
            return True

        do_q = do_exit = do_EOF = do_quit  # noqa: N815 - pdb's names

    return AttachedPdb


def _look_beside(pdb: Any, sock: socket.socket, answer: Answer) -> None:
    """Debug in another thread, beside a main thread that is in native code."""

    class ReadOnlyPdb(pdb.Pdb):  # type: ignore[misc]
        def setup(self, *args: Any) -> Any:
            """Select user code, if there is any: stepping is not possible here."""
            found = super().setup(*args)
            own = [at for at, (frame, _) in enumerate(self.stack) if breakpoints.is_own(frame)]
            if own:
                self.curindex = own[-1]
                self.curframe = self.stack[self.curindex][0]
                self.curframe_locals = self.curframe.f_locals
            return found

        def do_quit(self, _: str) -> bool:
            """q(uit): leave the debugger."""
            return True

        def native(self, _: str) -> None:
            """Not here: the main thread is in native code."""
            self.message("The main thread is in native code and cannot be stopped: use where, up, down and p, or quit.")

        do_q = do_exit = do_EOF = do_continue = do_cont = do_c = do_quit  # noqa: N815

    for name in _UNAVAILABLE:
        setattr(ReadOnlyPdb, f"do_{name}", ReadOnlyPdb.native)
    with thread_frames.reading():
        frame = sys._current_frames().get(terminal.main())
    stream = TerminalStream(sock)
    looking = ReadOnlyPdb(stdin=stream, stdout=stream, nosigint=True)
    session = terminal.begin(looking, stream, waits=False)
    try:
        answer({"how": "looking"})
        looking.reset()
        looking.interaction(frame, None)
    finally:
        session.end()


def _is_open(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)


# -- debugpy


def listen(port: int, answer: Answer) -> None:
    """Let an IDE connect, from this host only. Runs in a separate thread."""
    global _debugpy_address
    try:
        import debugpy

        _debugpy_address = _debugpy_address or debugpy.listen(("127.0.0.1", port))
    except ImportError:
        answer({"how": "missing", "why": sys.executable})
    except Exception as error:
        log.swallowed("forkserver.debug.debugger")
        answer({"how": "failed", "why": f"debugpy: {type(error).__name__}: {error}"})
    else:
        answer({"how": "listens", "port": _debugpy_address[1]})
