"""Breakpoints of the script: pdb uses a remote terminal through a socket.

`breakpoint()`, `pdb.set_trace()`, `pdb.post_mortem()` and `torch.distributed.breakpoint()` all call `Pdb.interaction`,
which is patched here. pdb is not imported before the script imports it.
"""

from __future__ import annotations

import _thread
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from .. import hidden_modules, log
from . import terminal
from .terminal import Session, TerminalStream


def install() -> None:
    """Patch pdb, now or when it is imported."""
    if (pdb := hidden_modules.find("pdb")) is not None:
        _redirect(pdb)
    else:
        _when_imported("pdb", _redirect)


def _redirect(module: ModuleType) -> None:
    """Patch the class in place, so that subclasses are patched too: torch creates one at every breakpoint."""
    pdb: Any = module.Pdb
    interaction, leave, interact = pdb.interaction, pdb.do_EOF, pdb.do_interact

    def remote_interaction(self: Any, frame: Any, *rest: Any, **named: Any) -> Any:
        session = _open_session(self, frame, rest)
        if session is None:
            return interaction(self, frame, *rest, **named)
        session.prompts += 1
        try:
            return interaction(self, frame, *rest, **named)
        except BaseException:  # most likely raised by a signal handler of the script: Python has stopped tracing
            if session.pdb is self:
                session.end()
            raise
        finally:
            session.prompts -= 1
            # The script continues if nothing is traced any more, or only breakpoints are, or if it was a post-mortem.
            if session.pdb is self and session.waits and (self.quitting or self.stoplineno == -1 or frame is None):
                session.end()

    def do_eof(self: Any, arg: str) -> Any:
        """Handle the end of input: Ctrl-D, or a terminal that was closed."""
        session = terminal.session()
        if session is not None and session.pdb is self and session.waits and session.stream.lost:
            sock = _announce(self.stack[self.curindex][0])
            if sock is not None:
                session.stream.close()
                session.stream.reconnect(sock)
                self.print_stack_entry(self.stack[self.curindex])
                return None
        return leave(self, arg)

    def do_interact(self: Any, arg: str) -> Any:
        if not isinstance(self.stdin, TerminalStream):
            return interact(self, arg)
        original = sys.stdin, sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = self.stdin, self.stdout, self.stdout
        try:
            return interact(self, arg)
        finally:
            sys.stdin, sys.stdout, sys.stderr = original

    do_eof.__doc__, do_interact.__doc__ = leave.__doc__, interact.__doc__  # pdb shows them as help
    pdb.interaction, pdb.do_EOF, pdb.do_interact = remote_interaction, do_eof, do_interact


def _open_session(pdb: Any, frame: FrameType | None, rest: tuple[Any, ...]) -> Session | None:
    """Return the session; None: this pdb has another input, or there is no agent."""
    ours = isinstance(pdb.stdin, TerminalStream) or (pdb.use_rawinput and type(pdb).cmdloop is _cmdloop())
    if ours and not terminal.is_connected() and not _has_terminal():
        who = f"process {os.getpid()}, a child of a rank,"
        sys.stderr.write(f"phalanx: {who} is at a breakpoint and has no terminal (for a DataLoader: num_workers=0)\n")
    if not ours or not terminal.is_connected():
        return None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()  # earlier output of the script comes first
        except Exception:  # a stream of the script's own may raise anything
            log.swallowed("forkserver.debug.breakpoints")
    session = terminal.session()
    if session is None or session.thread != _thread.get_ident():
        trace = rest[0] if rest else None
        trace = getattr(trace, "__traceback__", trace)  # an exception, in later versions of Python
        while trace is not None:  # a post-mortem: where it was raised
            frame, trace = trace.tb_frame, trace.tb_next
        terminal.acquire_turn()
        sock = _announce(frame)
        if sock is None:
            terminal.release_turn()
            return None
        session = terminal.begin(pdb, TerminalStream(sock), waits=True)
    pdb.stdin = pdb.stdout = session.stream
    pdb.skip = {*(pdb.skip or ()), __name__.replace("breakpoints", "debugger")}
    pdb.use_rawinput, pdb.nosigint = 0, True  # Ctrl-C is sent as another signal; SIGINT is for the run
    return session


def _has_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):
        return False


def _announce(frame: FrameType | None) -> socket.socket | None:
    ours, theirs = socket.socketpair()
    with theirs:
        if terminal.notify({"is": "breakpoint", "place": place(frame)}, [theirs.fileno()]):
            return ours
    ours.close()
    return None


def place(frame: FrameType | None) -> str:
    """Return file:line, in user code if there is any."""
    inner = frame
    while frame is not None and not is_own(frame):
        frame = frame.f_back
    found = frame or inner
    return f"{found.f_code.co_filename}:{found.f_lineno}".removeprefix(f"{os.getcwd()}/") if found is not None else ""


def is_own(frame: FrameType) -> bool:
    """Return whether a frame is neither in an installed package nor in Python itself."""
    name = frame.f_code.co_filename
    return "site-packages" not in name and not name.startswith(("<frozen", f"{os.path.dirname(os.__file__)}/"))


def _cmdloop() -> Any:
    import cmd

    return cmd.Cmd.cmdloop


def _when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` when a module of the standard library is imported. A user's module of that name is found by another
    finder.
    """
    finder = sys.path_importer_cache.get(os.path.dirname(os.__file__))
    if finder is None or not hasattr(finder, "__dict__"):
        return
    original = finder.find_spec

    def find_spec(wanted: str, target: Any = None) -> Any:
        spec = original(wanted, target)
        if wanted == name and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                act(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - likewise
        return spec

    setattr(finder, "find_spec", find_spec)  # noqa: B010 - of this finder only
