"""Copies shards during the training: from the next forward on. The next update waits for the end of the copy.

Nothing changes a shard in between. Before the forward a script may change it: weights are clipped after a step, or
exchanged for averaged ones to evaluate. On a GPU a separate stream copies to pinned memory and a thread does the rest;
on the CPU that thread copies too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from phalanx.train.snapshot.part import Writer

_RECENT = 20  # snapshots whose cost counts


class _Waiting(NamedTuple):
    writer: Writer
    finish: Callable[[], None]
    job: Future[None]


class ShardCopier:
    """Copies the shards of one snapshot at a time. `shares_cores`: the training computes on the same CPU cores."""

    def __init__(self, thread: ThreadPoolExecutor, *, shares_cores: bool) -> None:
        self._thread = thread
        self._shares_cores = shares_cores
        self._waiting: _Waiting | None = None
        self._copied: threading.Event | None = None
        self._began = 0.0  # `held` when the current snapshot began
        self._beside = 0.0  # CPU seconds of its thread
        self.held = 0.0  # total seconds that the training thread spent on snapshots
        self.costs: deque[float] = deque(maxlen=_RECENT)  # per snapshot
        self.durations: deque[float] = deque(maxlen=_RECENT)  # per snapshot, from the first copy until it is complete

    def later(self, writer: Writer, finish: Callable[[], None]) -> Future[None]:
        """Copy with `writer` at the next forward, then call `finish` in the thread. Done when it has returned."""
        job: Future[None] = Future()
        self._waiting = _Waiting(writer, finish, job)
        return job

    def forward(self) -> None:
        """Start the copy, before the first forward of a step."""
        if self._waiting is None:
            return
        began = time.perf_counter()
        waiting, self._waiting = self._waiting, None
        waiting.writer.start()
        self._copied = threading.Event()
        self._thread.submit(self._run, waiting, self._copied)
        self.hold(time.perf_counter() - began)

    def update(self) -> None:
        """Wait for the copy, before an update changes the shards."""
        self.forward()
        copied, self._copied = self._copied, None
        if copied is not None and not copied.is_set():
            began = time.perf_counter()
            copied.wait()
            self.hold(time.perf_counter() - began)

    def drop(self) -> None:
        """Drop a copy that has not started."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.job.set_result(None)

    # -- what it costs

    def hold(self, seconds: float) -> None:
        """Add seconds that the training thread has spent on a snapshot."""
        self.held += seconds

    def begin(self) -> None:
        """Begin to measure the cost of a snapshot."""
        self._began, self._beside = self.held, 0.0

    def end(self) -> None:
        """Record the cost of a snapshot that is complete."""
        self.costs.append(self.held - self._began + (self._beside if self._shares_cores else 0.0))

    def _run(self, waiting: _Waiting, copied: threading.Event) -> None:
        began, used = time.perf_counter(), time.thread_time()
        try:
            try:
                waiting.writer.copy()
            finally:
                copied.set()
            waiting.finish()
        except Exception as error:  # raised again in the thread that waits for the job
            waiting.job.set_exception(error)
            return
        self._beside += time.thread_time() - used
        self.durations.append(time.perf_counter() - began)
        waiting.job.set_result(None)
