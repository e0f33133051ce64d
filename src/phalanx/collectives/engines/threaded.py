"""A queue of calls with a thread, for engines that have no thread themselves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from phalanx.collectives.errors import GroupAborted

from .engine import EngineCall

ENDED = "the group was closed or aborted during a call"


class ThreadedTask:
    """A call in progress (engine.PendingCall)."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the job and store its outcome."""
        job, self._job = self._job, None  # release what it holds once it is done
        try:
            if job is not None:
                job()
        except BaseException as error:  # raised by `wait`, in the caller's thread
            self._error = error
        self._finished.set()

    def fail(self, error: BaseException) -> None:
        """Finish with an error, without running the job."""
        self._job, self._error = None, error
        self._finished.set()

    @property
    def source(self) -> int:
        """-1: a collective has no source."""
        return -1

    @property
    def finished(self) -> bool:
        """Whether it is known to have finished, without waiting or starting anything (flight_recorder.py)."""
        return self._finished.is_set()

    def done(self) -> bool:
        """Return whether it has finished."""
        return self._finished.is_set()

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait for it; return whether it has finished. Raises its error."""
        if not self._finished.wait(timeout or None):
            return False
        if self._error is not None:
            raise self._error
        return True


class Threaded:
    """`run` and `start` of an engine, one call at a time. A subclass implements `_do`.

    A call with no other before it runs in the calling thread. `_do` never runs in two threads at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._waiting: deque[ThreadedTask] = deque()
        self._busy = False  # a thread is in `_do`
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def _do(self, call: EngineCall) -> None:
        raise NotImplementedError

    def _interrupt(self) -> None:
        """Make threads that are in `_do`, or wait for a message, give up soon. Thread-safe."""

    def run(self, call: EngineCall) -> None:
        """Run a call after the earlier ones, and wait for it."""
        self._run_in_order(lambda: self._without_grad(call))

    def start(self, call: EngineCall) -> ThreadedTask:
        """Start a call in the thread."""
        return self._enqueue(lambda: self._without_grad(call))

    def _without_grad(self, call: EngineCall) -> None:
        with torch.no_grad():  # a collective is not differentiable
            self._do(call)

    def _run_in_order(self, job: Callable[[], None]) -> None:
        with self._changed:
            at_once = not self._busy and not self._waiting and not self._ended
            if at_once:
                self._busy = True
        if not at_once:
            self._enqueue(job).wait()
            return
        try:
            job()
        finally:
            self._release()

    def _enqueue(self, job: Callable[[], None]) -> ThreadedTask:
        task = ThreadedTask(job)
        with self._changed:
            if self._ended:
                raise GroupAborted(ENDED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="phalanx-collectives", daemon=True)
                self._thread.start()
            self._waiting.append(task)
            self._changed.notify_all()
        return task

    def abort(self) -> None:
        """Fail waiting calls and interrupt the running one. Thread-safe."""
        self._end()
        self._interrupt()

    def close(self) -> None:
        """Abort calls that wait, and wait for the one that is running."""
        self._end()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            aborted = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for task in aborted:
            task.fail(GroupAborted(ENDED))

    def _release(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or (self._waiting and not self._busy))
                if not self._waiting:
                    return
                task = self._waiting.popleft()
                self._busy = True
            task.run()
            self._release()
