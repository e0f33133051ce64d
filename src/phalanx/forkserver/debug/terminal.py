"""Whoever is at the debugger of this process: a terminal elsewhere, by a socket. One at a time."""

from __future__ import annotations

import _thread
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

LEAVE = "\x04\n"  # what a terminal sends for Ctrl-D

Say = Callable[[dict[str, Any], list[int]], None]

_say: Say | None = None  # None: nobody is there who has a terminal
_session: Session | None = None
_turn = _thread.allocate_lock()


def reach(say: Say | None) -> None:
    """Who is asked for a terminal. None, in a child of the worker: nobody."""
    global _say, _session, _turn
    _say, _session, _turn = say, None, _thread.allocate_lock()


def reachable() -> bool:
    return _say is not None


def tell(message: dict[str, Any], fds: list[int] | None = None) -> bool:
    if _say is None:
        return False
    try:
        _say(message, fds or [])
    except OSError:  # the agent is gone, and so will we be
        return False
    return True


def session() -> Session | None:
    return _session


def tidy() -> None:
    """Of a thread that was stepped through to its end, nobody else would say that it is through."""
    if _session is not None and _session.thread not in sys._current_frames():
        _session.end()


def take_turn(timeout: float = -1) -> bool:
    return _turn.acquire(timeout=timeout)


def leave_turn() -> None:
    _turn.release()


def main() -> int:
    return threading.main_thread().ident or 0


class TerminalStream:
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
        """For whoever is at the other end, too: a child that was forked meanwhile has the socket as well."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._sock.close()


class Session:
    """Somebody is at the debugger."""

    def __init__(self, pdb: Any, stream: TerminalStream, waits: bool) -> None:
        self.pdb = pdb
        self.stream = stream
        self.waits = waits  # for somebody else, if the one who is there goes
        self.thread = _thread.get_ident()
        self.prompts = 0  # it is in here, and not in the script

    def end(self) -> None:
        global _session
        if _session is not self:
            return
        _session = None  # first: Ctrl-C in the middle of this has nobody to call
        self.stream.close()
        tell({"is": "released"})
        _turn.release()


def begin(pdb: Any, stream: TerminalStream, *, waits: bool) -> Session:
    """Whose turn it is."""
    global _session
    _session = Session(pdb, stream, waits)
    return _session
