"""Copies of shards beside the training: they begin with the next forward, and the next update waits for their end.

Between the two nobody changes a shard. Before them a script may: weights are clipped after a step, or exchanged for
averaged ones to evaluate. On a GPU a stream of its own copies to pinned memory, and a thread does the rest; on the CPU
that thread copies too.
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


class Copying:
    """`shares_cores`: the thread takes its time from the training, as on a CPU that computes."""

    def __init__(self, thread: ThreadPoolExecutor, *, shares_cores: bool) -> None:
        self._thread = thread
        self._shares_cores = shares_cores
        self._waiting: _Waiting | None = None
        self._copied: threading.Event | None = None
        self._began = 0.0  # `held` when the snapshot at hand was begun
        self._beside = 0.0  # seconds of a core that its thread took
        self.held = 0.0  # seconds for which the training's thread was kept from its work, all snapshots together
        self.costs: deque[float] = deque(maxlen=_RECENT)  # of one snapshot
        self.durations: deque[float] = deque(maxlen=_RECENT)  # from its first copy until it is complete

    def later(self, writer: Writer, finish: Callable[[], None]) -> Future[None]:
        """`finish` is called in the thread when the shards are copied. Done when it has returned."""
        job: Future[None] = Future()
        self._waiting = _Waiting(writer, finish, job)
        return job

    def forward(self) -> None:
        """Before the first forward of a step."""
        if self._waiting is None:
            return
        began = time.perf_counter()
        waiting, self._waiting = self._waiting, None
        waiting.writer.start()
        self._copied = threading.Event()
        self._thread.submit(self._run, waiting, self._copied)
        self.hold(time.perf_counter() - began)

    def update(self) -> None:
        """Before an update: afterwards the shards may change."""
        self.forward()
        copied, self._copied = self._copied, None
        if copied is not None and not copied.is_set():
            began = time.perf_counter()
            copied.wait()
            self.hold(time.perf_counter() - began)

    def drop(self) -> None:
        """What has not begun is not copied any more."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.job.set_result(None)

    # -- what it costs

    def hold(self, seconds: float) -> None:
        """For so long the training's thread has worked for a snapshot."""
        self.held += seconds

    def begin(self) -> None:
        """A snapshot is begun, and what is held from now on is its cost."""
        self._began, self._beside = self.held, 0.0

    def end(self) -> None:
        """The last one is complete."""
        self.costs.append(self.held - self._began + (self._beside if self._shares_cores else 0.0))

    def _run(self, waiting: _Waiting, copied: threading.Event) -> None:
        began, used = time.perf_counter(), time.thread_time()
        try:
            try:
                waiting.writer.copy()
            finally:
                copied.set()
            waiting.finish()
        except Exception as error:
            waiting.job.set_exception(error)
            return
        self._beside += time.thread_time() - used
        self.durations.append(time.perf_counter() - began)
        waiting.job.set_result(None)
