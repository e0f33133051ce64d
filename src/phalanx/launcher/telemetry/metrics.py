"""Metrics of a training run, written by the leader: reported by rank 0, or parsed from its output."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from phalanx.contract import encoding, events
from phalanx.contract.messages import worker_messages as words
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.telemetry.loss_parser import LossParser, ParsedLoss

if TYPE_CHECKING:
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_ROOM = 1 << 20  # bytes of samples.jsonl, after which fewer metrics are kept
_INTERVAL = 0.2  # seconds between two that are kept, at first
_MOST = 1 << 15  # bytes of a log that are read per second

_decoder: encoding.Decoder[words.MeasuredStep] = encoding.Decoder(words.MeasuredStep)


@dataclass
class Downsampler:
    """Decides which lines to keep, so that the file of an endless run stays small.

    After every `room` bytes the time between two kept lines doubles.
    """

    room: int
    every: float = 0.0  # seconds, at first
    written: int = 0
    _last: float = float("-inf")

    @property
    def interval(self) -> float:
        """Return the current time between two kept lines, in seconds."""
        return self.every * float(2 ** (self.written // self.room))

    def keeps(self, now: float, *, always: bool = False) -> bool:
        """Return whether to keep a line of this time. Half of `every` is tolerance: ticks are not exact."""
        if not always and 0 <= now - self._last < self.interval - self.every / 2:
            return False
        self._last = now
        return True


class RunMetrics:
    """Sends the metrics of rank 0 to the leader. On the leader, writes them."""

    def __init__(self, rpc: NodeRpc, folder: RunFolder) -> None:
        self._rpc = rpc
        self._folder = folder
        self._downsampler = Downsampler(_ROOM, _INTERVAL)
        self._latest: events.MetricsMeasured | None = None  # if it is not in the file yet
        self._unwritten: dict[str, events.MetricsMeasured] = {}  # by name: the latest that has it, if not in the file
        self._parsers: dict[str, tuple[int, LossParser]] = {}  # by file: how far it was read
        self._task: asyncio.Task[None] | None = None
        self.samples = -1.0  # per second, of all ranks
        rpc.on("measured", self._receive)

    def send(self, message: words.MeasuredStep) -> None:
        """Send metrics of rank 0, which runs on this node, to the leader."""
        self._rpc.send("measured", 0, encoding.encode(message))

    def _receive(self, _: int | None, __: int, content: bytes) -> None:
        try:
            self._write(_decoder.decode(content))
        except Exception:  # it must not close the connection to the node that sent it
            logger.debug("cannot write metrics", exc_info=True)

    def _write(self, message: words.MeasuredStep) -> None:
        now = message.received or time.time()
        event = events.MetricsMeasured(
            time=round(now, 3),
            step=message.step,
            values=message.values,
            epoch=message.epoch,
            epochs=message.epochs,
            total=message.total,
            samples=self.samples,
        )
        self._folder.sample(event, kept=False)
        self._latest = event
        self._unwritten.update(dict.fromkeys(event.values, event))
        if self._downsampler.keeps(now):
            self._keep()

    def _keep(self) -> None:
        """Write the latest value of every name, with its own step, and the latest step.

        A value that comes seldom, such as an accuracy, is not lost because its own line was not kept.
        """
        lines = {id(event): event for event in (*self._unwritten.values(), self._latest) if event is not None}
        for event in sorted(lines.values(), key=lambda event: (event.time, event.step)):
            values = {name: value for name, value in event.values.items() if self._unwritten.get(name) is event}
            line = msgspec.structs.replace(event, values=values)
            self._downsampler.written += self._folder.sample(line, published=False)
        self._latest = None
        self._unwritten.clear()

    def concluded(self, attempt: WorkerGroup | None) -> None:
        """Write the last metrics of an attempt, regardless of the downsampler."""
        worker = _silent_first_rank(attempt) if attempt is not None else None
        if worker is not None and not self._reading:
            self._send_parsed(self._newest(worker.folder), _step(worker))
        if self._latest is not None:
            self._keep()

    # -- scripts that report nothing

    def read_output(self, attempt: WorkerGroup) -> None:
        """Look for a loss in the output of rank 0. Called every second."""
        worker = _silent_first_rank(attempt)
        if worker is not None and not self._reading:
            self._task = asyncio.get_running_loop().create_task(self._read_output(worker.folder, _step(worker)))

    async def end(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _reading(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _read_output(self, folder: str, step: int) -> None:
        """Read in a thread: a network disk may not respond for minutes."""
        try:
            self._send_parsed(await asyncio.to_thread(self._newest, folder), step)
        except Exception:
            logger.debug("cannot read metrics from %s", folder, exc_info=True)

    def _send_parsed(self, found: ParsedLoss | None, step: int) -> None:
        if found is not None:
            step = found.step if found.step is not None else step or found.bar or 0
            self.send(
                words.MeasuredStep(step=step, epoch=found.epoch or 0, total=found.total or 0, values=found.values)
            )

    def _newest(self, folder: str) -> ParsedLoss | None:
        for name in ("stdout", "stderr"):
            found = self._read(f"{folder}/{name}.log")
            if found is not None:
                return found
        return None

    def _read(self, path: str) -> ParsedLoss | None:
        at, parser = self._parsers.get(path) or (0, LossParser())
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                start = max(at, size - _MOST)
                data = os.pread(file.fileno(), _MOST, start) if size > at else b""
        except OSError:
            return None
        self._parsers[path] = (start + len(data), parser)
        return parser.feed(data, skipped=start > at) if data else None


def _silent_first_rank(attempt: WorkerGroup) -> Worker | None:
    """Return rank 0 if it runs on this node and reports no metrics."""
    first = [worker for worker in attempt.workers.values() if worker.seat.rank == 0 and not worker.spare]
    if attempt.measured is not None or not first:
        return None
    return max(first, key=lambda one: one.code is None)  # a dead one may still be listed besides its replacement


def _step(worker: Worker) -> int:
    return worker.probe.step if worker.probe is not None else 0
