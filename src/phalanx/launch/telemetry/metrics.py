"""What a training measures, at node 0: told by rank 0, or read from what that prints, wherever it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import msgspec

from phalanx.contract import events
from phalanx.contract import worker_messages as words
from phalanx.launch.ipc.node_rpc import NodeRpc
from phalanx.launch.runs.run_folder import RunFolder
from phalanx.launch.telemetry.downsampling import Downsampler
from phalanx.launch.telemetry.loss_parser import LossParser, ParsedLoss

if TYPE_CHECKING:
    from phalanx.launch.agent.worker import Worker
    from phalanx.launch.agent.worker_group import WorkerGroup

_ROOM = 1 << 20  # bytes of samples.jsonl, after which fewer are kept
_EVERY = 0.2  # seconds
_MOST = 1 << 15  # bytes of a stream that are read in a second

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[words.MeasuredStep] = msgspec.json.Decoder(words.MeasuredStep)


class RunMetrics:
    def __init__(self, post: NodeRpc, folder: RunFolder) -> None:
        self._post = post
        self._folder = folder
        self._thinning = Downsampler(_ROOM, _EVERY)
        self._unkept: events.MetricsMeasured | None = None
        self._gauges: dict[str, tuple[int, LossParser]] = {}  # by file: how far it was read
        self._reading: asyncio.Task[None] | None = None
        self.samples = -1.0  # of all ranks, a second
        post.reads("measured", self._heard)

    def told(self, message: words.MeasuredStep) -> None:
        """By rank 0, which is here."""
        self._post.send("measured", 0, _encoder.encode(message))

    def _heard(self, _: int | None, __: int, content: bytes) -> None:
        with contextlib.suppress(Exception):  # a letter must not cost the one who wrote it his place
            told = _decoder.decode(content)
            now = time.time()
            event = events.MetricsMeasured(
                time=round(now, 3),
                step=told.step,
                values=told.values,
                epoch=told.epoch,
                total=told.total,
                samples=self.samples,
            )
            kept = self._thinning.keeps(now)
            size = self._folder.sight(event, kept=kept)
            self._thinning.written += size if kept else 0
            self._unkept = None if kept else event

    def concluded(self, attempt: WorkerGroup | None) -> None:
        """The last one counts most."""
        worker = _first(attempt) if attempt is not None else None
        if worker is not None and not self._reads:
            self._tell(self._newest(worker.folder), _seen(worker))
        if self._unkept is not None:
            self._folder.sight(self._unkept)
            self._unkept = None

    # -- a script that does not tell

    def look(self, attempt: WorkerGroup) -> None:
        """Once a second."""
        worker = _first(attempt)
        if worker is not None and not self._reads:
            self._reading = asyncio.get_running_loop().create_task(self._look(worker.folder, _seen(worker)))

    async def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    @property
    def _reads(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def _look(self, folder: str, seen: int) -> None:
        """A disk of the network may be away for minutes: nobody else waits for it."""
        with contextlib.suppress(Exception):
            self._tell(await asyncio.to_thread(self._newest, folder), seen)

    def _tell(self, found: ParsedLoss | None, seen: int) -> None:
        if found is not None:
            step = found.step if found.step is not None else seen or found.bar or 0
            self.told(
                words.MeasuredStep(step=step, epoch=found.epoch or 0, total=found.total or 0, values=found.values)
            )

    def _newest(self, folder: str) -> ParsedLoss | None:
        for name in ("stdout", "stderr"):
            found = self._read(f"{folder}/{name}.log")
            if found is not None:
                return found
        return None

    def _read(self, path: str) -> ParsedLoss | None:
        at, gauge = self._gauges.get(path) or (0, LossParser())
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                start = max(at, size - _MOST)
                data = os.pread(file.fileno(), _MOST, start) if size > at else b""
        except OSError:
            return None
        self._gauges[path] = (start + len(data), gauge)
        return gauge.feed(data, skipped=start > at) if data else None


def _first(attempt: WorkerGroup) -> Worker | None:
    """Rank 0, where it is here and does not tell itself."""
    first = [worker for worker in attempt.workers.values() if worker.seat.rank == 0 and not worker.spare]
    if attempt.measured is not None or not first:
        return None
    return max(first, key=lambda one: one.code is None)  # the one before it may lie there still


def _seen(worker: Worker) -> int:
    return worker.probe.step if worker.probe is not None else 0
