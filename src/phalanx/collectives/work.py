"""What a group gives back for what it has begun: torch's Work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from .engines.engine import PendingCall
from .errors import CollectiveTimeout, GroupAborted

_telling = threading.Lock()  # once each
_AT_ONCE = timedelta(0)  # what torch's C++ side says for "no limit"


class StartedWork(dist.Work):  # type: ignore[misc]
    """Something under way. Its tensors live until it is over, whoever else lets go of them.

    `after`: once, when it is over and before anybody learns of it (what came is copied to where it was wanted).
    """

    def __init__(
        self,
        name: str,
        pendings: Sequence[PendingCall],
        tensors: Sequence[torch.Tensor],
        watcher: Watcher | DetachedWork,
        *,
        after: Callable[[], None] | None = None,
        keep: object = None,
    ) -> None:
        super().__init__()
        self._name = name
        self.pendings = pendings
        self.tensors = tensors
        self._watcher = watcher
        self._after = after
        self._once = threading.Lock() if after is not None else None
        self._keep = keep
        self._future: Any = None
        self._settled: Any = None  # the future that was given away
        self._over = False  # and the engine, which may be gone by then, is not asked any more
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        for pending in () if self._over else self.pendings:
            if not pending.wait(max(seconds, 0.0)):
                raise CollectiveTimeout(f"{self._name} was not over after {seconds:g} s (timeout)")
        if self._error is not None:
            raise self._error
        self._finish()
        return True

    def end(self) -> None:
        """Its engine ends, or its group lets go of it: how it went stays known."""
        if not self._over:
            ended = GroupAborted(f"{self._name}: the group was ended while it was under way")
            self._error = self.exception() if self.is_completed() else ended
            self._over = True
            self._tell()  # what the engine still waits in may take its time

    def _finish(self) -> None:
        self._keep = None
        if self._once is not None:
            with self._once:
                if self._after is not None:
                    self._after()
                self._after = None  # and not before: others take it for done

    def is_completed(self) -> bool:
        if not self._over and not all(pending.done() for pending in self.pendings):
            return False
        if self._after is not None and self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """None too while it is under way."""
        if self._over:
            return self._error
        for pending in self.pendings:
            if pending.done():
                try:
                    pending.wait()
                except Exception as error:
                    return error
        return None

    def result(self) -> Sequence[torch.Tensor]:
        self.wait()
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.pendings[0].source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Sequence[torch.Tensor]]:
        """Kept by a thread of the group: the C++ side waits for it where no Python may run."""
        if self._settled is None:
            future: torch.futures.Future[None] = torch.futures.Future()
            # An exception that Python sets is not one for C++; one that is raised in a callback is.
            self._settled = future.then(lambda _: self.result())
            self._future = future
            if self.is_completed():
                self.settle()
            else:
                self._watcher.watch(self)
        return self._settled

    def get_future_result(self) -> torch.futures.Future[int]:
        """0: it went well, as torch counts."""
        return self.get_future().then(lambda future: 0 * len(future.wait()))

    def settle(self) -> None:
        """Until it is over: then whoever waits for the future goes on."""
        for pending in () if self._over else self.pendings:
            try:
                pending.wait()
            except Exception:  # it is raised where the result is asked for
                break
        self._tell()

    def _tell(self) -> None:
        with _telling:
            future, self._future = self._future, None
        if future is not None:
            future.set_result(None)


class DoneWork(dist.Work):  # type: ignore[misc]
    """What was over before anybody could ask."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = _AT_ONCE) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> Sequence[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        pass

    block_current_stream = synchronize

    def get_future(self) -> torch.futures.Future[Sequence[torch.Tensor]]:
        future: torch.futures.Future[Sequence[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class DetachedWork:
    """Messages come in any order: a thread for each whose future is asked for."""

    def watch(self, work: StartedWork) -> None:
        threading.Thread(target=work.settle, name="phalanx-future", daemon=True).start()


class Watcher:
    """One thread of a group that completes futures, from the first that is asked for."""

    def __init__(self) -> None:
        self._works: SimpleQueue[StartedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()

    def watch(self, work: StartedWork) -> None:
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="phalanx-futures", daemon=True)
                self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        """After the engine: whatever was under way is over."""
        with self._start:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._works.put(None)
            thread.join(10)

    def _work(self) -> None:
        while (work := self._works.get()) is not None:
            work.settle()
