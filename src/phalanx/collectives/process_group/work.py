"""torch's Work objects: handles of calls that have started or finished."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from phalanx.collectives.engines.engine import PendingCall
from phalanx.collectives.errors import CollectiveTimeout, GroupAborted

logger = logging.getLogger(__name__)

_completing = threading.Lock()  # a future is completed once
_NO_TIMEOUT = timedelta(0)  # torch's C++ code passes this for "no timeout"


class StartedWork(dist.Work):  # type: ignore[misc]
    """A call that has started. It keeps its tensors alive until it has finished.

    `after` runs once, when the call has finished and before a caller sees that: it copies results to their
    destinations.
    """

    def __init__(
        self,
        name: str,
        pendings: Sequence[PendingCall],
        tensors: Sequence[torch.Tensor],
        completer: FutureCompleter | FutureThreads,
        *,
        after: Callable[[], None] | None = None,
        keep: object = None,
    ) -> None:
        super().__init__()
        self._name = name
        self.pendings = pendings
        self.tensors = tensors
        self._completer = completer
        self._after = after
        self._once = threading.Lock() if after is not None else None
        self._keep = keep
        self._future: Any = None
        self._public_future: Any = None  # the future that was handed out
        self._done = False  # if True, the engine, which may be closed, is not queried
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call has finished; raise its error, or CollectiveTimeout."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        for pending in () if self._done else self.pendings:
            if not pending.wait(max(seconds, 0.0)):
                raise CollectiveTimeout(f"{self._name} timed out after {seconds:g} s")
        if self._error is not None:
            raise self._error
        self._finish()
        return True

    def detach(self) -> None:
        """Store the outcome, because the engine is being closed or the group drops this call."""
        if not self._done:
            aborted = GroupAborted(f"{self._name}: the group was closed during the call")
            self._error = self.exception() if self.is_completed() else aborted
            self._done = True
            self._complete_future()  # without waiting for work that the engine still does

    def _finish(self) -> None:
        self._keep = None
        if self._once is not None:
            with self._once:
                if self._after is not None:
                    self._after()
                self._after = None  # last: other threads treat this as finished

    def is_completed(self) -> bool:
        """Return whether the call has finished."""
        if not self._done and not all(pending.done() for pending in self.pendings):
            return False
        if self._after is not None and self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        """Return whether the call has finished without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of the call, or None. Also None if it has not finished."""
        if self._done:
            return self._error
        for pending in self.pendings:
            if pending.done():
                try:
                    pending.wait()
                except Exception as error:  # torch asks for it
                    return error
        return None

    def result(self) -> Sequence[torch.Tensor]:
        """Wait, and return the output tensors."""
        self.wait()
        return self.tensors

    def synchronize(self) -> None:
        """Wait until the call has finished."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait until the call has finished."""
        self.wait()

    def _source_rank(self) -> int:
        return self.pendings[0].source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Sequence[torch.Tensor]]:
        """Return a future that a thread of the group completes: C++ code waits for it where no Python code can run."""
        if self._public_future is None:
            future: torch.futures.Future[None] = torch.futures.Future()
            # An exception set from Python is not visible to C++; one that is raised in a callback is.
            self._public_future = future.then(lambda _: self.result())
            self._future = future
            if self.is_completed():
                self.complete()
            else:
                self._completer.watch(self)
        return self._public_future

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a future of the result code: 0, success."""
        return self.get_future().then(lambda future: 0 * len(future.wait()))

    def complete(self) -> None:
        """Wait for the call and complete the future."""
        for pending in () if self._done else self.pendings:
            try:
                pending.wait()
            except Exception:  # raised where the result is requested
                logger.debug("%s failed", self._name, exc_info=True)
                break
        self._complete_future()

    def _complete_future(self) -> None:
        with _completing:
            future, self._future = self._future, None
        if future is not None:
            future.set_result(None)


class DoneWork(dist.Work):  # type: ignore[misc]
    """A call that had finished when it returned."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None."""
        return

    def result(self) -> Sequence[torch.Tensor]:
        """Return the output tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Do nothing."""

    block_current_stream = synchronize

    def get_future(self) -> torch.futures.Future[Sequence[torch.Tensor]]:
        """Return a completed future of the output tensors."""
        future: torch.futures.Future[Sequence[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class FutureThreads:
    """Completes the futures of messages, which finish in any order: one thread per future."""

    def watch(self, work: StartedWork) -> None:
        """Complete the future of `work` in a new thread."""
        threading.Thread(target=work.complete, name="phalanx-future", daemon=True).start()


class FutureCompleter:
    """Completes the futures of collectives: one thread per group, started on first use."""

    def __init__(self) -> None:
        self._works: SimpleQueue[StartedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()

    def watch(self, work: StartedWork) -> None:
        """Complete the future of `work` in the group's thread, after the earlier ones."""
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="phalanx-futures", daemon=True)
                self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        """Stop the thread. Call this after the engine was closed, when all calls have finished."""
        with self._start:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._works.put(None)
            thread.join(10)

    def _work(self) -> None:
        while (work := self._works.get()) is not None:
            work.complete()
