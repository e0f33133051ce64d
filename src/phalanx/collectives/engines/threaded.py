"""Calls in their order, in a thread where they go on while Python computes: for engines that have none of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from phalanx.collectives.errors import GroupAborted

from .engine import EngineCall

ENDED = "the group was ended while something was under way in it"


class ThreadedTask:
    """Something under way (engine.Pending)."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        job, self._job = self._job, None  # what it holds is let go once it is done
        try:
            if job is not None:
                job()
        except BaseException as error:
            self._error = error
        self._over.set()

    def fail(self, error: BaseException) -> None:
        self._job, self._error = None, error
        self._over.set()

    @property
    def source(self) -> int:
        return -1

    @property
    def over(self) -> bool:
        """As far as is known: for who looks on, and must neither wait nor set anything going (journal.py)."""
        return self._over.is_set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float = 0.0) -> bool:
        if not self._over.wait(timeout or None):
            return False
        if self._error is not None:
            raise self._error
        return True


class Threaded:
    """An engine's `run` and `start`, one call after the other: the subclass has `_do`, and calls `close`.

    A call that nothing is waiting before is done in the thread that asks. Then its `_do` is never in two threads at
    once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._waiting: deque[ThreadedTask] = deque()
        self._busy = False  # somebody is in `_do`
        self._ended = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def _do(self, call: EngineCall) -> None:
        raise NotImplementedError

    def _interrupt(self) -> None:
        """From any thread: whoever is in `_do`, or waits for a message, gives up as soon as it can."""

    def run(self, call: EngineCall) -> None:
        self._in_turn(lambda: self._silently(call))

    def start(self, call: EngineCall) -> ThreadedTask:
        return self._later(lambda: self._silently(call))

    def _silently(self, call: EngineCall) -> None:
        with torch.no_grad():  # what is reduced may want a gradient: this is nothing to take one of
            self._do(call)

    def _in_turn(self, job: Callable[[], None]) -> None:
        with self._change:
            at_once = not self._busy and not self._waiting and not self._ended
            if at_once:
                self._busy = True
        if not at_once:
            self._later(job).wait()
            return
        try:
            job()
        finally:
            self._free()

    def _later(self, job: Callable[[], None]) -> ThreadedTask:
        task = ThreadedTask(job)
        with self._change:
            if self._ended:
                raise GroupAborted(ENDED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="phalanx-collectives", daemon=True)
                self._thread.start()
            self._waiting.append(task)
            self._change.notify_all()
        return task

    def abort(self) -> None:
        self._end()
        self._interrupt()

    def close(self) -> None:
        """What still waits is aborted; what is being done is waited for."""
        self._end()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)

    def _end(self) -> None:
        with self._change:
            self._ended = True
            given_up = list(self._waiting)
            self._waiting.clear()
            self._change.notify_all()
        for task in given_up:
            task.fail(GroupAborted(ENDED))

    def _free(self) -> None:
        with self._change:
            self._busy = False
            self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ended or (self._waiting and not self._busy))
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                self._busy = True
            task.run()
            self._free()
