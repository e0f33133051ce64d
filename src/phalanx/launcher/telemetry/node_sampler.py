"""The only poller of a node: reads every worker twice per second and passes the result to all consumers.

Each tick reads the status slot and the kernel's counters of every worker once. Hang detector, step timings, collector
and exits all use that reading. Data for the leader is sent in one message per second, with one section per consumer.
With more than 1,024 nodes it is sent less often, so that the leader does not get more messages per second.
Ticks are at whole and half seconds of the leader's clock, so that samples of different nodes align.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from phalanx.contract import encoding
from phalanx.forkserver.board.status_slot import StatusReading
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.telemetry import gpus
from phalanx.launcher.telemetry.process_stats import ProcessStats, ProcessStatsReader

if TYPE_CHECKING:
    from phalanx.diagnose.evidence import Gpu
    from phalanx.launcher.workers.watched import WatchedAgent
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds
TENTHS = 10  # per second: samples have one letter for each
_AFTER = 0.01  # seconds after the whole or half second
_KIND = "telemetry"  # of the message to the leader
_NODES_PER_SECOND = 1024  # messages that a leader takes per second
_LONGEST_PERIOD = 5  # seconds: a status slot remembers six
_GPU_INTERVAL = 5.0  # seconds
_GPU_TIMEOUT = 2.0  # seconds for the GPU driver to answer

_sections: encoding.Decoder[dict[str, msgspec.Raw]] = encoding.Decoder(dict[str, msgspec.Raw])


def period(nodes: int) -> int:
    """Return the seconds between two messages of a node to the leader, in a run of `nodes` nodes."""
    return min(_LONGEST_PERIOD, max(1, -(-nodes // _NODES_PER_SECOND)))


def turn(node: int, nodes: int) -> float:
    """Return after how many seconds of a period a node sends: spread, so that the leader has no peaks of work.

    With a period of one second, all nodes send at once. Otherwise the last second is reserved for late messages.
    """
    return (period(nodes) - 1) * node / nodes


@dataclass(frozen=True)
class WorkerReading:
    """One worker at one tick."""

    name: str
    worker: Worker
    status: StatusReading | None = None  # None: it has no probe
    stats: ProcessStats | None = None  # None: it has exited
    gpu: Gpu | None = None  # the driver's latest answer; a new answer is a new object


@dataclass(frozen=True)
class NodeReading:
    """All workers of a node at one tick."""

    attempt: WorkerGroup
    workers: tuple[WorkerReading, ...]  # spares left out
    now: float  # seconds of `time.monotonic`
    wall: float  # seconds of the leader's clock
    due: bool = True  # the first tick of a period: the one whose results are sent
    last: bool = False  # the attempt is over, and its status slots are about to be released
    period: int = 1  # seconds

    @property
    def tick(self) -> int:
        """Return the tenth of a second, by the leader's clock, up to which this reading counts."""
        return int(self.wall * TENTHS) if self.last else int(self.wall) // self.period * self.period * TENTHS


class Consumer(Protocol):
    """Processes readings of this node and, on the leader, data of other nodes."""

    section: str  # its part of the message

    def observe(self, reading: NodeReading) -> object | None:
        """Process a reading of this node. Return the data for the leader, or None."""

    def receive(self, member: int, content: bytes) -> None:
        """Process the data that the same consumer of another node returned. Called on the leader."""


class NodeSampler:
    """Polls the workers of this node and feeds its consumers, from `start` to `end`."""

    def __init__(
        self,
        agent: WatchedAgent,
        links: NodeLinks,
        rpc: NodeRpc,
        *,
        attempt: WorkerGroup | None = None,
    ) -> None:
        self._agent = agent
        self._links = links
        self._rpc = rpc
        self.stats = ProcessStatsReader()
        self._consumers: tuple[Consumer, ...] = ()
        self._attempt = attempt  # the latest: it may already be over
        self._concluded: WorkerGroup | None = None
        self._last_due = 0  # when a message was due last: the number of the period
        self._unsent: bytes | None = None  # a message that waits for the turn of this node
        self._turn: asyncio.TimerHandle | None = None
        self._gpus: dict[str, Gpu] = {}
        self._gpus_asked = time.monotonic()
        self._gpu_task: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, *consumers: Consumer) -> None:
        """Start polling for these consumers."""
        self._consumers = consumers
        self._rpc.on(_KIND, self._receive)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def end(self) -> None:
        """Stop polling."""
        if self._turn is not None:
            self._turn.cancel()
        tasks = [task for task in (self._task, self._gpu_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def concluded(self) -> None:
        """Take a last reading: the attempt is over, and its status slots are about to be released."""
        self.sample(last=True)
        self._concluded = self._agent.attempt

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL - self._wall() % INTERVAL + _AFTER)

    def _wall(self) -> float:
        return time.time() - self._links.skew

    def sample(self, *, last: bool = False) -> None:
        """Read all workers once and feed the consumers. Errors are logged: watching must not disturb the run."""
        try:
            self._sample(last=last)
        except Exception:
            logger.debug("cannot sample the workers", exc_info=True)

    def _sample(self, *, last: bool) -> None:
        attempt = self._agent.attempt or self._attempt
        if attempt is None:
            return
        if attempt is not self._attempt:
            self._attempt, self._gpus = attempt, {}
        reading = self._read(attempt, last=last)
        sections: dict[str, object] = {}
        for consumer in self._consumers:
            try:
                section = consumer.observe(reading)
            except Exception:
                logger.debug("%s: cannot process a reading", consumer.section, exc_info=True)
                continue
            if section is not None:
                sections[consumer.section] = section
        if sections and reading.due and not self._links.leads:
            self._send_unsent()
            self._unsent = encoding.encode(sections)
            group = self._agent.plan.group
            self._send_later(0.0 if last else turn(group.node_rank, group.node_count))
        if not last and reading.now - self._gpus_asked >= _GPU_INTERVAL:
            self._gpus_asked = reading.now
            self._ask_driver(attempt)

    def _send_later(self, delay: float) -> None:
        if delay:
            self._turn = asyncio.get_running_loop().call_later(delay, self._send_unsent)
        else:
            self._send_unsent()

    def _send_unsent(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._unsent is not None:
            self._rpc.send(_KIND, 0, self._unsent)
            self._unsent = None

    def _read(self, attempt: WorkerGroup, *, last: bool) -> NodeReading:
        now, wall, seconds = time.monotonic(), self._wall(), period(self._agent.plan.group.node_count)
        before, self._last_due = self._last_due, int(wall) // seconds
        self.stats.forget({worker.pid for _, worker in attempt.living})
        workers = tuple(
            WorkerReading(
                name,
                worker,
                worker.probe.status if worker.probe is not None and attempt is not self._concluded else None,
                self.stats.read(worker.pid) if worker.code is None and worker.pid else None,
                self._gpus.get(name),
            )
            for name, worker in attempt.workers.items()
            if not worker.spare
        )
        due = last or self._last_due != before
        return NodeReading(attempt, workers, now, wall, due=due, last=last, period=seconds)

    def _receive(self, member: int | None, _: int, content: bytes) -> None:
        if member is None:
            return
        try:
            sections = _sections.decode(content)
        except msgspec.DecodeError:
            logger.debug("unreadable telemetry from node %d", member, exc_info=True)
            return
        for consumer in self._consumers:
            if consumer.section in sections:
                try:
                    consumer.receive(member, bytes(sections[consumer.section]))
                except Exception:
                    logger.debug("%s: cannot process what node %d sent", consumer.section, member, exc_info=True)

    def _ask_driver(self, attempt: WorkerGroup) -> None:
        if self._gpu_task is None or self._gpu_task.done():
            self._gpu_task = asyncio.get_running_loop().create_task(self._read_gpus(attempt))

    async def _read_gpus(self, attempt: WorkerGroup) -> None:
        workers = [(name, worker) for name, worker in attempt.living if not worker.spare]
        devices = [worker.seat.slot.device for _, worker in workers]
        for (name, _), gpu in zip(workers, await gpus.query(devices, _GPU_TIMEOUT), strict=True):
            if gpu is not None and attempt is self._attempt:
                self._gpus[name] = gpu
