"""A worker's line to its agent: it hears of deaths while the script computes, and tells how far it is."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from phalanx.contract import worker_messages as words
from phalanx.errors import LaunchError

BEAT = 0.5  # seconds between two signs of life
_FIRST = 30.0  # for the agent to say where we stand: it is on this machine, and waits for nothing


class AgentChannel:
    """`world` is where this worker stands.

    When that changes, the thread of `listen` calls `leave`, then publishes the new world, then calls `moved`. So
    nothing of the next group exists yet when `leave` cuts the old one. `has_moved` is true from before `leave` on:
    nothing counts that an operation of the old group has left half done. `heard` is called with whatever else the
    agent says.
    """

    def __init__(
        self,
        name: str,
        leave: Callable[[], None],
        moved: Callable[[], None],
        beat: Callable[[], words.Heartbeat],
        heard: Callable[[words.Halt | words.Rescue | words.EndWorker], None],
        *,
        here: words.Hello,
    ) -> None:
        self._leave = leave
        self._moved = moved
        self._heard = heard
        self._beat = beat
        self._changed = threading.Condition()
        self._sock, first = _called(name, here)
        self.preempt = first.preempt  # signals that are not for a worker to die of
        self._world = first if isinstance(first, words.Assignment) else None
        self._waiting = self._world is None  # a spare, or one of too few
        self._leaving = False  # the old group, and the next one is not known yet
        self._gone = False
        self._pid = os.getpid()
        self._ending, self._end = os.pipe()

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="phalanx-line", daemon=True).start()

    @property
    def world(self) -> words.Assignment:
        """Where it stands now. A spare waits here until it stands anywhere."""
        with self._changed:
            self._changed.wait_for(lambda: self._world is not None or self._gone)
            if self._world is None:
                raise LaunchError("the agent of this run is gone, and this worker was a spare")
            return self._world

    @property
    def is_spare(self) -> bool:
        """It has never had a place."""
        return self._world is None

    @property
    def generation(self) -> int:
        """Of where it stands, at once; -1: nowhere yet."""
        world = self._world
        return -1 if world is None else world.generation

    def newer(self, than: words.Assignment, patience: float) -> words.Assignment | None:
        """The world of a later generation than this one, as soon as there is one. None: nobody tells of any."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._later(than), patience)
            if self._waiting:
                self._changed.wait_for(lambda: self._gone or self._later(than))
            return self._world if self._later(than) else None

    def has_moved(self, since: words.Assignment) -> bool:
        with self._changed:
            return self._leaving or self._waiting or self._later(since)

    def _later(self, than: words.Assignment) -> bool:
        return self._world is not None and self._world.generation > than.generation

    def tell(self, message: words.FromWorker) -> None:
        with contextlib.suppress(OSError):  # the agent is gone, and this process will be in a moment
            self._send(message)

    def mention(self, message: words.FromWorker) -> None:
        """What nobody waits for: an agent that does not listen for a while must not hold up a training."""
        with contextlib.suppress(OSError, UnicodeError):  # a name may be half a letter
            self._sock.send(words.encode(message), socket.MSG_DONTWAIT)

    def close(self) -> None:
        if os.getpid() != self._pid:  # a fork has no thread to end
            return
        with self._changed:
            if not self._gone:
                os.write(self._end, b".")

    def _send(self, message: words.FromWorker) -> None:
        self._sock.send(words.encode(message))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(BEAT * 1000)}
            if self._ending in ready:
                break
            if not ready:
                self.tell(self._beat())
                continue
            try:
                packet = self._sock.recv(words.LARGEST)
            except OSError:
                packet = b""
            if not packet:
                self._heard(words.EndWorker(signal.SIGTERM))  # the agent is gone
                break
            message = words.from_agent(packet)
            if isinstance(message, words.Halt | words.Rescue | words.EndWorker):
                self._heard(message)
                continue
            with self._changed:
                self._leaving = True
            self._leave()
            with self._changed:
                self._waiting = isinstance(message, words.Wait)
                self._world = self._world if isinstance(message, words.Wait) else message
                self._leaving = False
                self._changed.notify_all()
            self._moved()
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._sock.close()
        os.close(self._ending)
        os.close(self._end)


def _called(name: str, here: words.Hello) -> tuple[socket.socket, words.Assignment | words.Wait]:
    """A connection, and what is said first."""
    until = time.monotonic() + _FIRST
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(max(until - time.monotonic(), 0.1))
        try:
            sock.connect(f"\0{name}")
            sock.send(words.encode(here))
            first = words.from_agent(sock.recv(words.LARGEST))
            if not isinstance(first, words.Assignment | words.Wait):
                raise OSError("the run is about to end")
        except (OSError, msgspec.MsgspecError) as error:
            sock.close()
            # An agent that has not heard of our birth yet does not know us.
            if time.monotonic() < until and isinstance(error, ConnectionError | msgspec.MsgspecError):
                time.sleep(0.01)
                continue
            raise LaunchError(f"the agent of this run cannot be reached: {error}") from error
        sock.settimeout(None)
        return sock, first
