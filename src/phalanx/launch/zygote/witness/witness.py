"""The thread: publishes where the main thread is, and answers the supervisor."""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import mmap
import os
import select
import signal
import socket
import time
from typing import Any

from .. import wire  # noqa: TID252 - it is loaded by path, under another name
from . import checker, ledger, page, recorder, sampler, steps

EVERY = 0.1  # seconds between two looks
SIGNAL = signal.SIGRTMIN + 7  # all stacks, from C: works while Python's lock is held


def begin(board: int, slot: int, channel: int, stacks: int, *, check: bool = False) -> None:
    """In a worker that is about to run its script."""
    memory = mmap.mmap(board, 0)
    os.close(board)
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=False)
    own = page.Page(memory, slot)
    witness = Witness(own, socket.socket(fileno=channel))
    os.register_at_fork(after_in_child=witness.leave)
    atexit.register(witness.end)
    steps.count(own)
    if check:
        checker.begin(ledger.Ledger(memory, slot), slot)
    _thread.start_new_thread(witness.run, ())


class Witness:
    def __init__(self, own: page.Page, channel: socket.socket) -> None:
        self._page = own
        self._channel = channel
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._wake, self._end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Not a thread that Python knows of: a script that counts its threads finds its own."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            self._watch()
        except Exception:  # what is only shown must not end what is run
            pass
        finally:
            self._ended.release()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        look = sampler.Sampler(self._page)
        while True:
            ready = [fd for fd, _ in poll.poll(EVERY * 1000)]
            if self._wake in ready:
                return
            if self._channel.fileno() in ready:
                received = wire.receive(self._channel)
                if received is None:  # the supervisor is gone, and so will we be
                    return
                self._answer(*received)
            look.publish(time.monotonic_ns())

    def _answer(self, order: dict[str, Any], fds: list[int]) -> None:
        match order["do"]:
            case "tell":
                wire.send(self._channel, {"is": "told", "id": order["id"], **recorder.everything()})
            case _:
                for fd in fds:
                    os.close(fd)

    def leave(self) -> None:
        """In a child of the worker, which has this page and this channel too, and no thread."""
        self._channel.close()
        steps.forget()

    def end(self) -> None:
        """Python takes its threads away at the end, wherever they are: in the middle of C++ that is a crash."""
        os.write(self._end, b"x")
        self._ended.acquire(timeout=1.0)
