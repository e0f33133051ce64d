"""The watchers of a node's workers: sampler, hang detector, step timings, collector, exits.

They start shortly after the first workers, because importing them takes as long as importing the rest of the agent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from phalanx.contract.messages import worker_messages
from phalanx.diagnose.rules.collectives.timeouts import Timeout
from phalanx.launcher.agent.metadata_recorder import MetadataRecorder
from phalanx.launcher.workers.watched import WatchContext
from phalanx.launcher.workers.worker_group import WorkerGroup

if TYPE_CHECKING:
    from phalanx.launcher.agent.stopping.exits import Exits
    from phalanx.launcher.hangs.detector import HangDetector
    from phalanx.launcher.telemetry.collector import Collector
    from phalanx.launcher.telemetry.node_sampler import NodeSampler
    from phalanx.launcher.telemetry.step_timings import StepTimings

_EARLY = 1000  # metrics that wait for the watchers
_DELAY = 0.5  # seconds from the start of the workers to that of the watchers


@dataclass(frozen=True)
class _Started:
    sampler: NodeSampler
    hang_detector: HangDetector
    step_timings: StepTimings
    collector: Collector
    exits: Exits

    async def end(self) -> None:
        for watcher in (self.sampler, self.hang_detector, self.collector, self.exits):
            await watcher.end()


class Watchers:
    """Starts the watchers once per run, and ends them together. Metrics that arrive before wait for them."""

    def __init__(self, context: WatchContext) -> None:
        self._context = context
        self._metadata = MetadataRecorder(context)
        self._starting: asyncio.Task[None] | None = None
        self._started: _Started | None = None
        self._early: deque[worker_messages.MeasuredStep] = deque(maxlen=_EARLY)  # from before they have started

    def start(self, attempt: WorkerGroup) -> None:
        """Start them after a delay, if this is the first attempt."""
        self._metadata.start()
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start(attempt))

    async def _start(self, attempt: WorkerGroup) -> None:
        await asyncio.sleep(_DELAY)
        exits, detector, timings, collector, sampler = await asyncio.to_thread(_import_watchers)
        context = self._context
        nodes = (context.agent, context.links, context.rpc)
        sampling = sampler(*nodes, attempt=attempt)
        started = self._started = _Started(
            sampler=sampling,
            exits=exits(context.agent.note, sampling.stats),
            hang_detector=detector(context, stats=sampling.stats, attempt=attempt),
            step_timings=timings(context),
            collector=collector(*nodes, context.folder),
        )
        sampling.start(started.exits, started.hang_detector, started.step_timings, started.collector)
        while self._early:
            started.collector.measured(self._early.popleft())

    async def blame(self, rank: int, timeout: Timeout) -> list[str]:
        """Return lines that explain why a rank timed out."""
        if self._started is None and self._starting is not None:
            await asyncio.wait((self._starting,))
        return await self._started.hang_detector.blame(rank, timeout) if self._started is not None else []

    def measured(self, message: worker_messages.MeasuredStep) -> None:
        """Handle metrics of rank 0."""
        if self._started is not None:
            self._started.collector.measured(message)
        else:
            self._early.append(msgspec.structs.replace(message, received=time.time()))

    def attempt_over(self) -> None:
        """Take a last sample of an attempt before its status slots are released."""
        if self._started is not None:
            self._started.sampler.concluded()

    def stall_report(self) -> str:
        """Return why the run was stalled when it ended. Empty if it was not."""
        return self._started.hang_detector.final_report if self._started is not None else ""

    def timings_report(self, *, succeeded: bool) -> str:
        """Return what to print about step timings at the end of a run. Empty: nothing."""
        return self._started.step_timings.final_report(succeeded=succeeded) if self._started is not None else ""

    @property
    def pids(self) -> frozenset[int]:
        """Return the pids of their child processes, which other code must not end."""
        return self._metadata.pids

    async def end(self) -> None:
        """End all of them, or their start."""
        await self._metadata.end()
        if self._starting is not None:
            self._starting.cancel()
        if self._started is not None:
            await self._started.end()


def _import_watchers() -> tuple[type[Exits], type[HangDetector], type[StepTimings], type[Collector], type[NodeSampler]]:
    """Import the watchers, in a thread."""
    from phalanx.launcher.agent.stopping.exits import Exits
    from phalanx.launcher.hangs.detector import HangDetector
    from phalanx.launcher.telemetry.collector import Collector
    from phalanx.launcher.telemetry.node_sampler import NodeSampler
    from phalanx.launcher.telemetry.step_timings import StepTimings

    return Exits, HangDetector, StepTimings, Collector, NodeSampler
