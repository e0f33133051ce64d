"""The remote terminal of this process's debugger, through a socket. One session at a time."""

from __future__ import annotations

import _thread
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from .. import thread_frames

LEAVE = "\x04\n"  # what a terminal sends for Ctrl-D

Send = Callable[[dict[str, Any], list[int]], None]

_send: Send | None = None  # None: there is no agent with a terminal
_session: Session | None = None
_turn = _thread.allocate_lock()


def connect(send: Send | None) -> None:
    """Set the function that sends to the agent. None in a child of the worker, which has no agent."""
    global _send, _session, _turn
    _send, _session, _turn = send, None, _thread.allocate_lock()


def is_connected() -> bool:
    """Return whether an agent can provide a terminal."""
    return _send is not None


def notify(message: dict[str, Any], fds: list[int] | None = None) -> bool:
    """Send a message to the agent; return whether that worked."""
    if _send is None:
        return False
    try:
        _send(message, fds or [])
    except OSError:  # the agent is gone
        return False
    return True


def session() -> Session | None:
    """Return the current session, or None."""
    return _session


def end_stale_session() -> None:
    """End the session of a thread that was stepped through to its end. Nothing else ends it."""
    with thread_frames.reading():
        running = set(sys._current_frames())
    if _session is not None and _session.thread not in running:
        _session.end()


def acquire_turn(timeout: float = -1) -> bool:
    """Wait for the right to start a session; return whether it was granted."""
    return _turn.acquire(timeout=timeout)


def release_turn() -> None:
    """Release the right to start a session."""
    _turn.release()


def main() -> int:
    """Return the id of the main thread."""
    return threading.main_thread().ident or 0


class TerminalStream:
    """A remote terminal with the interface that pdb expects. Its errors do not end the script."""

    encoding = "utf-8"

    def __init__(self, sock: socket.socket) -> None:
        self.reconnect(sock)

    def reconnect(self, sock: socket.socket) -> None:
        """Use another socket."""
        self._sock = sock
        self._lines = sock.makefile("r", encoding="utf-8", errors="replace", newline="\n")
        self.lost = False

    def readline(self, *_: Any) -> str:
        """Return the next line; empty at the end."""
        try:
            line = self._lines.readline()
        except (OSError, ValueError):
            line = ""
        self.lost = not line
        return "" if line == LEAVE else line

    def write(self, text: str) -> int:
        """Send text."""
        with contextlib.suppress(OSError):
            self._sock.sendall(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: text is sent at once."""

    def isatty(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Close the socket, and shut it down: a child that was forked meanwhile has a copy."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._sock.close()


class Session:
    """A debugger session."""

    def __init__(self, pdb: Any, stream: TerminalStream, waits: bool) -> None:
        self.pdb = pdb
        self.stream = stream
        self.waits = waits  # whether it waits for another terminal if this one is closed
        self.thread = _thread.get_ident()
        self.prompts = 0  # number of prompts on the stack

    def end(self) -> None:
        """Close the terminal and let the next session start."""
        global _session
        if _session is not self:
            return
        _session = None  # first: a Ctrl-C now must not find it
        self.stream.close()
        notify({"is": "released"})
        _turn.release()


def begin(pdb: Any, stream: TerminalStream, *, waits: bool) -> Session:
    """Start a session. The caller holds the turn."""
    global _session
    _session = Session(pdb, stream, waits)
    return _session
