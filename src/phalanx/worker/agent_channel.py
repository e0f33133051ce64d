"""The channel of a worker to its agent: it receives assignments while the script computes, and sends heartbeats."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx.contract import encoding
from phalanx.contract.messages import worker_messages as messages
from phalanx.errors import LaunchError
from phalanx.forkserver import linux
from phalanx.worker.parent_death import ParentDeath

logger = logging.getLogger(__name__)
HEARTBEAT_INTERVAL = 0.5  # seconds
_CONNECT_TIMEOUT = 30.0  # seconds for the first assignment: the agent is on this host, and waits for nothing


@dataclass(frozen=True)
class ChannelCallbacks:
    """What the thread of a channel calls.

    leave      when the agent sends a new assignment, before it is published: the old group is cut before anything of
               the next one exists. `has_moved` is true from before this call on, so that results of incomplete
               operations of the old group are not used
    moved      after the new assignment is published
    heartbeat  twice per second; its result is sent
    received   with any other message of the agent
    """

    leave: Callable[[], None]
    moved: Callable[[], None]
    heartbeat: Callable[[], messages.Heartbeat]
    received: Callable[[messages.Halt | messages.Rescue | messages.EndWorker], None]


class AgentChannel:
    """Receives the messages of the agent in a thread."""

    def __init__(self, name: str, call: ChannelCallbacks, *, hello: messages.Hello) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._parent_death = ParentDeath()
        self._sock, first = _connect(name, hello, self._parent_death)
        self.preempt = first.preempt  # signals that the agent handles, not the worker
        self._assignment = first if isinstance(first, messages.Assignment) else None
        self._waiting = self._assignment is None  # a spare, or there are too few workers
        self._leaving = False  # leaving the old group; the new assignment is not published yet
        self._gone = False
        self._final = False  # no other assignment follows
        self._pid = os.getpid()
        self._ending, self._end = os.pipe()

    def listen(self) -> None:
        """Start the thread that receives messages."""
        threading.Thread(target=self._listen, name="phalanx-channel", daemon=True).start()

    @property
    def assignment(self) -> messages.Assignment:
        """The current assignment. A spare waits here until it gets one."""
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or self._gone)
            if self._assignment is None:
                raise LaunchError("the agent of this run is gone, and this worker is a spare")
            return self._assignment

    @property
    def is_spare(self) -> bool:
        """Whether this worker has never had an assignment."""
        return self._assignment is None

    @property
    def generation(self) -> int:
        """The generation of the current assignment, without waiting; -1: there is none yet."""
        assignment = self._assignment
        return -1 if assignment is None else assignment.generation

    def newer(self, than: messages.Assignment, patience: float) -> messages.Assignment | None:
        """Return the assignment of a later generation as soon as there is one; None: none within `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._final or self._later(than), patience)
            if self._waiting:
                self._changed.wait_for(lambda: self._gone or self._later(than))
            return self._assignment if self._later(than) else None

    def has_moved(self, since: messages.Assignment) -> bool:
        """Return whether the group of this assignment is lost."""
        with self._changed:
            return self._leaving or self._waiting or self._later(since)

    def _later(self, than: messages.Assignment) -> bool:
        return self._assignment is not None and self._assignment.generation > than.generation

    def send(self, message: messages.FromWorker) -> None:
        """Send a message."""
        with contextlib.suppress(OSError):  # the agent has ended; this process is ended in a moment
            self._sock.send(encoding.encode(message))

    def send_nowait(self, message: messages.FromWorker) -> None:
        """Send a message, or drop it if the agent does not read for a while: that must not delay the training."""
        with contextlib.suppress(OSError, UnicodeError):  # the name of a metric may be cut within a character
            self._sock.send(encoding.encode(message), socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the thread that receives messages."""
        if os.getpid() != self._pid:  # a fork has no thread to end
            return
        self._parent_death.restore()
        with self._changed:
            if not self._gone:
                os.write(self._end, b".")

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(HEARTBEAT_INTERVAL * 1000)}
            if self._ending in ready:
                break
            if not ready:
                self._parent_death.check()
                self.send(self._call.heartbeat())
                continue
            try:
                packet = self._sock.recv(encoding.PACKET_LIMIT)
            except OSError:
                packet = b""
            if not packet:
                self._parent_death.agent_gone()
                self._call.received(messages.EndWorker(signal.SIGTERM, failed=True))  # the agent has ended
                break
            message = messages.from_agent.decode(packet)
            logger.debug("the agent sent %s", type(message).__name__)
            if isinstance(message, messages.Halt | messages.Rescue | messages.EndWorker):
                self._call.received(message)
                continue
            if isinstance(message, messages.NoRegroup):
                with self._changed:
                    self._final = True
                    self._changed.notify_all()
                continue
            with self._changed:
                self._leaving = True
            self._call.leave()
            with self._changed:
                self._waiting = isinstance(message, messages.Wait)
                self._assignment = self._assignment if isinstance(message, messages.Wait) else message
                self._leaving = False
                self._changed.notify_all()
            self._call.moved()
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._sock.close()
        os.close(self._ending)
        os.close(self._end)


def _connect(
    name: str, hello: messages.Hello, parent_death: ParentDeath
) -> tuple[socket.socket, messages.Assignment | messages.Wait]:
    """Connect to the agent; return the socket and its first message."""
    until = time.monotonic() + _CONNECT_TIMEOUT
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(max(until - time.monotonic(), 0.1))
        try:
            linux.connect_to_own(sock, name)
            outlives = parent_death.outlive(linux.peer(sock).pid)
            sock.send(encoding.encode(msgspec.structs.replace(hello, outlives=outlives)))
            first = messages.from_agent.decode(sock.recv(encoding.PACKET_LIMIT))
            if not isinstance(first, messages.Assignment | messages.Wait):
                raise OSError("the run is ending")
        except (OSError, msgspec.MsgspecError) as error:
            sock.close()
            # The agent may not know yet that this worker was forked.
            if time.monotonic() < until and isinstance(error, ConnectionError | msgspec.MsgspecError):
                time.sleep(0.01)
                continue
            raise LaunchError(f"the agent of this run cannot be reached: {error}") from error
        sock.settimeout(None)
        return sock, first
