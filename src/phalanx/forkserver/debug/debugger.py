"""Somebody attaches to this worker: a debugger wherever its main thread is, or debugpy for an IDE."""

from __future__ import annotations

import _thread
import select
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from . import breakpoints, terminal
from .terminal import Say, TerminalStream

SIGNAL = signal.SIGRTMIN + 8  # the main thread is to come to the debugger

_COMES = 1.0  # seconds for the main thread: it is in native code if it does not
_SOON = 0.2  # for one who is just leaving
_STEPS = (
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
_callers: list[tuple[socket.socket, Any]] = []  # who attaches, and what to release once the main thread has come
_interrupts: list[Any] = []  # likewise
_listens: tuple[str, int] | None = None  # where debugpy does


def lay(say: Say) -> None:
    """In the main thread, before the script."""
    terminal.reach(say)
    signal.signal(SIGNAL, _called)
    breakpoints.lay()


def forget() -> None:
    """In a child of the worker: nobody listens to it, and it must not ask at a terminal that is not its own."""
    untrace()
    terminal.reach(None)


def untrace() -> None:
    """A debugger with breakpoints has no business in what comes now."""
    tracer = getattr(sys.gettrace(), "__self__", None)
    if isinstance(getattr(tracer, "stdin", None), TerminalStream):
        sys.settrace(None)


def attach(sock: socket.socket, answer: Answer) -> None:
    """In a thread of its own."""
    if not _there(sock):  # it has waited in vain, for Python's lock was held
        sock.close()
        return
    if not terminal.take_turn(_SOON):
        sock.close()
        answer({"how": "busy"})
        return
    try:
        import pdb

        if signal.getsignal(SIGNAL) is not _called:
            raise RuntimeError(f"the script uses signal {SIGNAL} for something else")

        came = _thread.allocate_lock()
        came.acquire()
        _callers.append((sock, came))
        signal.pthread_kill(terminal.main(), SIGNAL)
        stopped = came.acquire(timeout=_COMES) or not _uncalled()
    except Exception as error:  # no thread any more, or a pdb that is not Python's
        _uncalled()
        terminal.leave_turn()
        sock.close()
        answer({"how": "failed", "why": f"{type(error).__name__}: {error}"})
        return
    if stopped:
        answer({"how": "stopped"})
    else:
        _look(pdb, sock, answer)


def _uncalled() -> bool:
    """False: the main thread has just come."""
    try:
        _callers.pop()
    except IndexError:
        return False
    return True


def interrupt(answer: Answer) -> None:
    """Ctrl-C at the terminal of a debugger. In a thread of its own."""
    session = terminal.session()
    if session is None or session.thread != terminal.main():
        answer({"came": True})  # there is only a prompt
        return
    came = _thread.allocate_lock()
    came.acquire()
    _interrupts.append(came)
    signal.pthread_kill(terminal.main(), SIGNAL)
    answer({"came": came.acquire(timeout=_COMES)})


def _called(_: int, frame: FrameType | None) -> None:
    """In the main thread, wherever it is in Python: also in a sleep, or before a lock."""
    session = terminal.session()
    if _callers:
        sock, came = _callers.pop()
        came.release()
        stream = TerminalStream(sock)
        try:
            pdb = _attached()(stream)
        except Exception:  # a .pdbrc that cannot be read: not the script's to fail of
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
    """Here and now. `Pdb.set_trace` would stop at the next line, and a sleep is not over before."""
    sys.settrace(None)  # it is not the debugger that is looked at
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


def _attached() -> Any:
    import pdb

    class Attached(pdb.Pdb):
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
            """q(uit): leave the debugger. The rank goes on."""
            self.clear_all_breaks()
            self.set_continue()
            return True

        do_q = do_exit = do_EOF = do_quit  # noqa: N815 - pdb's names

    return Attached


def _look(pdb: Any, sock: socket.socket, answer: Answer) -> None:
    """Beside a main thread that is in native code."""

    class Looking(pdb.Pdb):  # type: ignore[misc]
        def setup(self, *args: Any) -> Any:
            """In the user's own code, where there is any: nobody steps from here."""
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
            self.message("It is in native code, and cannot be stopped there: look (where, up, down, p), or quit.")

        do_q = do_exit = do_EOF = do_continue = do_cont = do_c = do_quit  # noqa: N815

    for name in _STEPS:
        setattr(Looking, f"do_{name}", Looking.native)
    frame = sys._current_frames().get(terminal.main())
    stream = TerminalStream(sock)
    looking = Looking(stdin=stream, stdout=stream, nosigint=True)
    session = terminal.begin(looking, stream, waits=False)
    try:
        answer({"how": "looking"})
        looking.reset()
        looking.interaction(frame, None)
    finally:
        session.end()


def _there(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)


# -- debugpy


def listen(port: int, answer: Answer) -> None:
    """An IDE may connect, from this machine alone. In a thread of its own."""
    global _listens
    try:
        import debugpy

        _listens = _listens or debugpy.listen(("127.0.0.1", port))
    except ImportError:
        answer({"how": "missing", "why": sys.executable})
    except Exception as error:
        answer({"how": "failed", "why": f"debugpy: {type(error).__name__}: {error}"})
    else:
        answer({"how": "listens", "port": _listens[1]})
