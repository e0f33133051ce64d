"""Breakpoints of the script: its debugger gets a terminal from whoever has one.

pdb itself, with a socket for a terminal: `breakpoint()`, `pdb.set_trace()`, `pdb.post_mortem()` and
`torch.distributed.breakpoint()` all end in `Pdb.interaction`, where this begins. Nothing is imported before.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from . import terminal
from .terminal import Session, TerminalStream


def lay() -> None:
    if "pdb" in sys.modules:
        _redirect(sys.modules["pdb"])
    else:
        _when_imported("pdb", _redirect)


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
        except BaseException:  # a signal of the script's own, most likely: Python traces nothing any more
            if session.pdb is self:
                session.end()
            raise
        finally:
            session.prompts -= 1
            # The script goes on: nothing is traced, or nothing but breakpoints; or it was a post-mortem.
            if session.pdb is self and session.waits and (self.quitting or self.stoplineno == -1 or frame is None):
                session.end()

    def do_eof(self: Any, arg: str) -> Any:
        """Ctrl-D is one thing, a terminal that was closed another."""
        session = terminal.session()
        if session is not None and session.pdb is self and session.waits and session.stream.lost:
            sock = _announce(self.stack[self.curindex][0])
            if sock is not None:
                session.stream.close()
                session.stream.renew(sock)
                self.print_stack_entry(self.stack[self.curindex])
                return None
        return leave(self, arg)

    def do_interact(self: Any, arg: str) -> Any:
        if not isinstance(self.stdin, TerminalStream):
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
    ours = isinstance(pdb.stdin, TerminalStream) or (pdb.use_rawinput and type(pdb).cmdloop is _cmdloop())
    if ours and not terminal.reachable() and not _typed_to():
        who = f"process {os.getpid()}, which is no rank but was started by one"
        sys.stderr.write(f"phalanx: {who}, is at a breakpoint, and has no terminal (of a DataLoader: num_workers=0)\n")
    if not ours or not terminal.reachable():
        return None
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # what the script has printed comes first
    session = terminal.session()
    if session is None or session.thread != _thread.get_ident():
        trace = rest[0] if rest else None
        trace = getattr(trace, "__traceback__", trace)  # an exception, in later versions of Python
        while trace is not None:  # a post-mortem: where it died
            frame, trace = trace.tb_frame, trace.tb_next
        terminal.take_turn()
        sock = _announce(frame)
        if sock is None:
            terminal.leave_turn()
            return None
        session = terminal.begin(pdb, TerminalStream(sock), waits=True)
    pdb.stdin = pdb.stdout = session.stream
    pdb.skip = {*(pdb.skip or ()), __name__.replace("breakpoints", "debugger")}
    pdb.use_rawinput, pdb.nosigint = 0, True  # Ctrl-C comes by a signal of ours; SIGINT is the run's
    return session


def _typed_to() -> bool:
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):
        return False


def _announce(frame: FrameType | None) -> socket.socket | None:
    ours, theirs = socket.socketpair()
    with theirs:
        if terminal.tell({"is": "breakpoint", "place": place(frame)}, [theirs.fileno()]):
            return ours
    ours.close()
    return None


def place(frame: FrameType | None) -> str:
    """In the user's own code, where there is any of it."""
    inner = frame
    while frame is not None and not is_own(frame):
        frame = frame.f_back
    found = frame or inner
    return f"{found.f_code.co_filename}:{found.f_lineno}".removeprefix(f"{os.getcwd()}/") if found is not None else ""


def is_own(frame: FrameType) -> bool:
    """Neither of an installed package nor of Python itself."""
    name = frame.f_code.co_filename
    return "site-packages" not in name and not name.startswith(("<frozen", f"{os.path.dirname(os.__file__)}/"))


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

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - likewise
        return spec

    setattr(finder, "find_spec", find_spec)  # noqa: B010 - of this one alone
