"""A debugger in this worker: at a breakpoint of the script, or wherever it is when somebody attaches.

pdb itself, with a socket for a terminal: `breakpoint()`, `pdb.set_trace()`, `pdb.post_mortem()` and
`torch.distributed.breakpoint()` all end in `Pdb.interaction`, where this begins. Nothing is imported before.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

SIGNAL = signal.SIGRTMIN + 8  # the main thread is to come to the debugger
LEAVE = "\x04\n"  # what a terminal sends for Ctrl-D

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

Say = Callable[[dict[str, Any], list[int]], None]
Answer = Callable[[dict[str, Any]], None]

_say: Say | None = None  # None: nobody is there who has a terminal
_session: Session | None = None
_turn = _thread.allocate_lock()  # one thread at a time
_callers: list[tuple[socket.socket, Any]] = []  # who attaches, and what to release once the main thread has come
_interrupts: list[Any] = []
_listens: tuple[str, int] | None = None  # where debugpy does


def lay(say: Say) -> None:
    """In the main thread, before the script."""
    global _say
    _say = say
    signal.signal(SIGNAL, _called)
    if "pdb" in sys.modules:
        _redirect(sys.modules["pdb"])
    else:
        _when_imported("pdb", _redirect)


def forget() -> None:
    """In a child of the worker: nobody listens to it."""
    global _say, _session, _turn
    _say, _session, _turn = None, None, _thread.allocate_lock()


class Stream:
    """A terminal elsewhere, as pdb reads and writes it. Whatever becomes of it, the script does not end of that."""

    encoding = "utf-8"

    def __init__(self, sock: socket.socket) -> None:
        self.renew(sock)

    def renew(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines = sock.makefile("r", encoding="utf-8", errors="replace", newline="\n")
        self.lost = False

    def readline(self, *_: Any) -> str:
        try:
            line = self._lines.readline()
        except (OSError, ValueError):
            line = ""
        self.lost = not line
        return "" if line == LEAVE else line

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._sock.sendall(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
        self._sock.close()


class Session:
    """Somebody is at the debugger. One at a time in a process."""

    def __init__(self, pdb: Any, stream: Stream, waits: bool) -> None:
        self.pdb = pdb
        self.stream = stream
        self.waits = waits  # for somebody else, if the one who is there goes
        self.thread = _thread.get_ident()
        self.prompts = 0  # it is in here, and not in the script

    def end(self) -> None:
        global _session
        if _session is not self:
            return
        self.stream.close()
        _tell({"is": "released"})
        _session = None
        _turn.release()


def _begin(pdb: Any, stream: Stream, *, waits: bool) -> Session:
    global _session
    _session = Session(pdb, stream, waits)
    return _session


def _tell(message: dict[str, Any], fds: list[int] | None = None) -> bool:
    if _say is None:
        return False
    try:
        _say(message, fds or [])
    except OSError:  # the supervisor is gone, and so will we be
        return False
    return True


# -- a breakpoint of the script


def _redirect(module: ModuleType) -> None:
    """In place, for whatever class comes of it: torch's is made of this one at every breakpoint."""
    pdb: Any = module.Pdb
    interaction, leave, interact = pdb.interaction, pdb.do_EOF, pdb.do_interact

    def at_our_terminal(self: Any, frame: Any, *rest: Any, **named: Any) -> Any:
        session = _sit_down(self, frame, rest)
        if session is None:
            return interaction(self, frame, *rest, **named)
        session.prompts += 1
        try:
            return interaction(self, frame, *rest, **named)
        finally:
            session.prompts -= 1
            # The script goes on: nothing is traced, or nothing but breakpoints; or it was a post-mortem.
            if session.pdb is self and session.waits and (self.quitting or self.stoplineno == -1 or frame is None):
                session.end()

    def do_eof(self: Any, arg: str) -> Any:
        """Ctrl-D is one thing, a terminal that was closed another."""
        session = _session
        if session is not None and session.pdb is self and session.waits and session.stream.lost:
            sock = _announce(self.stack[self.curindex][0])
            if sock is not None:
                session.stream.close()
                session.stream.renew(sock)
                self.print_stack_entry(self.stack[self.curindex])
                return None
        return leave(self, arg)

    def do_interact(self: Any, arg: str) -> Any:
        if not isinstance(self.stdin, Stream):
            return interact(self, arg)
        plain = sys.stdin, sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = self.stdin, self.stdout, self.stdout
        try:
            return interact(self, arg)
        finally:
            sys.stdin, sys.stdout, sys.stderr = plain

    do_eof.__doc__, do_interact.__doc__ = leave.__doc__, interact.__doc__  # they are pdb's help
    pdb.interaction, pdb.do_EOF, pdb.do_interact = at_our_terminal, do_eof, do_interact


def _sit_down(pdb: Any, frame: FrameType | None, rest: tuple[Any, ...]) -> Session | None:
    """None: this one has been given something else to read from, or there is nobody to ask."""
    ours = isinstance(pdb.stdin, Stream) or (pdb.use_rawinput and type(pdb).cmdloop is _cmdloop())
    if _say is None or not ours:
        return None
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # what the script has printed comes first
    session = _session
    if session is None or session.thread != _thread.get_ident():
        trace = rest[0] if rest else None
        while trace is not None:  # a post-mortem: where it died
            frame, trace = trace.tb_frame, trace.tb_next
        _turn.acquire()
        sock = _announce(frame)
        if sock is None:
            _turn.release()
            return None
        session = _begin(pdb, Stream(sock), waits=True)
    pdb.stdin = pdb.stdout = session.stream
    pdb.use_rawinput, pdb.nosigint = 0, True  # Ctrl-C comes by a signal of ours; SIGINT is the run's
    return session


def _announce(frame: FrameType | None) -> socket.socket | None:
    ours, theirs = socket.socketpair()
    with theirs:
        if _tell({"is": "breakpoint", "place": place(frame)}, [theirs.fileno()]):
            return ours
    ours.close()
    return None


def place(frame: FrameType | None) -> str:
    """In the user's own code, where there is any of it."""
    found = ""
    while frame is not None:
        name = frame.f_code.co_filename
        found = found or f"{name}:{frame.f_lineno}"
        if "site-packages" not in name:
            found = f"{name}:{frame.f_lineno}"
            break
        frame = frame.f_back
    return found.removeprefix(f"{os.getcwd()}/")


def _cmdloop() -> Any:
    import cmd

    return cmd.Cmd.cmdloop


def _when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """By the one who finds Python's own modules: a module of the user's with that name is found by somebody else."""
    finder = sys.path_importer_cache.get(os.path.dirname(os.__file__))
    if finder is None or not hasattr(finder, "__dict__"):
        return
    plain = finder.find_spec

    def find_spec(wanted: str, target: Any = None) -> Any:
        spec = plain(wanted, target)
        if wanted == name and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                act(module)

            spec.loader.exec_module = exec_module
        return spec

    setattr(finder, "find_spec", find_spec)  # noqa: B010 - of this one alone


# -- somebody attaches


def attach(sock: socket.socket, answer: Answer) -> None:
    """In a thread of its own."""
    if not _there(sock):  # it has waited in vain, for Python's lock was held
        sock.close()
        return
    if not _turn.acquire(timeout=_SOON):
        sock.close()
        answer({"how": "busy"})
        return
    try:
        import pdb

        came = _thread.allocate_lock()
        came.acquire()
        _callers.append((sock, came))
        signal.pthread_kill(_main(), SIGNAL)
        stopped = came.acquire(timeout=_COMES) or not _uncalled()
    except Exception as error:  # no thread any more, or a pdb that is not Python's
        _uncalled()
        _turn.release()
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
    session = _session
    if session is None or session.thread != _main():
        answer({"came": True})  # there is only a prompt
        return
    came = _thread.allocate_lock()
    came.acquire()
    _interrupts.append(came)
    signal.pthread_kill(_main(), SIGNAL)
    answer({"came": came.acquire(timeout=_COMES)})


def _called(_: int, frame: FrameType | None) -> None:
    """In the main thread, wherever it is in Python: also in a sleep, or before a lock."""
    session = _session
    if _callers:
        sock, came = _callers.pop()
        came.release()
        pdb = _attached()(Stream(sock))
        _begin(pdb, pdb.stdin, waits=False)
        _break_in(pdb, frame)
    elif _interrupts:
        while _interrupts:
            _interrupts.pop().release()
        if session is None or session.thread != _main():
            return
        if not session.prompts:
            session.pdb.message("\nInterrupted. (Use 'cont' to resume).")
            _break_in(session.pdb, frame)
        elif session.pdb.allow_kbdint:
            raise KeyboardInterrupt


def _break_in(pdb: Any, frame: FrameType | None) -> None:
    """Here and now. `Pdb.set_trace` would stop at the next line, and a sleep is not over before."""
    pdb.reset()
    outer = frame
    while outer is not None:
        outer.f_trace = pdb.trace_dispatch
        pdb.botframe = outer
        outer = outer.f_back
    pdb.set_step()
    sys.settrace(None)  # it is not the debugger that is looked at
    pdb.interaction(frame, None)
    if not pdb.quitting and (pdb.stoplineno != -1 or pdb.breaks):
        sys.settrace(pdb.trace_dispatch)


def _attached() -> Any:
    import pdb

    class Attached(pdb.Pdb):
        def __init__(self, stream: Stream) -> None:
            super().__init__(stdin=stream, stdout=stream, nosigint=True)  # type: ignore[arg-type]

        def interaction(self, *args: Any, **named: Any) -> None:
            session = _session
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
        def do_quit(self, _: str) -> bool:
            """q(uit): leave the debugger."""
            return True

        def native(self, _: str) -> None:
            """Not here: the main thread is in native code."""
            self.message("It is in native code, and cannot be stopped there: look (where, up, down, p), or quit.")

        do_q = do_exit = do_EOF = do_continue = do_cont = do_c = do_quit  # noqa: N815

    for name in _STEPS:
        setattr(Looking, f"do_{name}", Looking.native)
    frame = sys._current_frames().get(_main())
    stream = Stream(sock)
    looking = Looking(stdin=stream, stdout=stream, nosigint=True)
    session = _begin(looking, stream, waits=False)
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


def _main() -> int:
    return threading.main_thread().ident or 0


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
