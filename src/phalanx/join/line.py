"""A worker's line to its supervisor: it hears of deaths while the script computes, and tells how far it is."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable

import msgspec

from phalanx.contract import line as words
from phalanx.errors import LaunchError

BEAT = 0.5  # seconds between two signs of life
_FIRST = 10.0  # for the supervisor to say where we stand: it is on this machine, and waits for nothing


class Line:
    """`world` is where this worker stands. `moved` is called, by the thread of `listen`, when it stands elsewhere;
    `heard` with whatever else the supervisor says."""

    def __init__(
        self,
        name: str,
        moved: Callable[[], None],
        steps: Callable[[], int],
        heard: Callable[[words.Halt | words.End], None],
    ) -> None:
        self._moved = moved
        self._heard = heard
        self._steps = steps
        self._changed = threading.Condition()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(_FIRST)
        try:
            self._sock.connect(f"\0{name}")
            self._send(words.Here())
            first = words.from_supervisor(self._sock.recv(words.LARGEST))
            if not isinstance(first, words.World):
                raise OSError("the run is about to end")
            self.world = first
        except (OSError, msgspec.MsgspecError) as error:
            self._sock.close()
            raise LaunchError(f"the supervisor of this run cannot be reached: {error}") from error
        self._pid = os.getpid()
        self._ending, self._end = os.pipe()

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="phalanx-line", daemon=True).start()

    def newer(self, than: int, timeout: float) -> words.World | None:
        """The world of a later generation than this one, as soon as there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self.world.generation > than, timeout)
            return self.world if self.world.generation > than else None

    def tell(self, message: words.FromWorker) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and this process will be in a moment
            self._send(message)

    def close(self) -> None:
        if os.getpid() == self._pid:  # a fork has no thread to end
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
                self.tell(words.Beat(self._steps()))
                continue
            try:
                packet = self._sock.recv(words.LARGEST)
            except OSError:
                packet = b""
            if not packet:
                self._heard(words.End(signal.SIGTERM))  # the supervisor is gone
                break
            message = words.from_supervisor(packet)
            if not isinstance(message, words.World):
                self._heard(message)
                continue
            with self._changed:
                self.world = message
                self._changed.notify_all()
            self._moved()
        self._sock.close()
