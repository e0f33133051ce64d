"""The progress of the ranks of all nodes, from heartbeats of the nodes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.contract.encoding import Decoder
from phalanx.diagnose.progress import Alarm
from phalanx.launcher.hangs.progress_tracker import ProgressTracker, RankProgress
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.telemetry.node_sampler import NodeReading, period

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchedAgent
    from phalanx.launcher.workers.worker_group import WorkerGroup

_QUIET = 3.0  # periods without a heartbeat from a node whose workers run
_SLOW_START = 10.0  # seconds for a node to send its first heartbeat


class NodeHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The message that a node sends to the leader every second, or less often: see `node_sampler.period`."""

    node: int
    host: str
    ranks: tuple[RankProgress, ...]


_heartbeats: Decoder[NodeHeartbeat] = Decoder(NodeHeartbeat)


class ClusterProgress:
    """Measures the progress of this node's ranks. On the leader, follows the ranks of all nodes."""

    def __init__(self, agent: WatchedAgent, links: NodeLinks, attempt: WorkerGroup | None) -> None:
        self.attempt = attempt  # the latest: it may already be over
        self.tracker: ProgressTracker | None = None  # None: no progress is expected
        self._agent = agent
        self._links = links
        self._received: dict[int, tuple[float, NodeHeartbeat]] = {}  # by member: time, and heartbeat

    @property
    def generation(self) -> tuple[int, int] | None:
        """Return the attempt and the generation that are followed."""
        return self.tracker.generation if self.tracker is not None else None

    @property
    def _period(self) -> int:
        return period(self._agent.plan.group.node_count)

    @property
    def quiet(self) -> float:
        """Return the seconds without a heartbeat after which a node counts as silent."""
        return _QUIET * self._period

    def heartbeat(self, reading: NodeReading) -> NodeHeartbeat | None:
        """Return the progress of all started workers of this node, dead ones included. None: none is expected."""
        self.attempt = attempt = reading.attempt
        # Ranks of other nodes may still run, and stall, after those of this node have ended.
        alone = self._links.leads and not self._links.members()
        if attempt.stopping or attempt.workers.ending or attempt.held or (attempt.over.is_set() and alone):
            self.tracker = None
            return None
        generation = (attempt.number, attempt.generation)
        if self.tracker is None or self.tracker.generation != generation:
            timeout = self._agent.plan.hang.stall_timeout
            # What is known of a rank may be as old as a period.
            self.tracker = ProgressTracker(generation, timeout and timeout + self._period - 1)
        ranks = tuple(
            self.tracker.measure(each, debugged=each.worker.seat.rank in attempt.workers.debugged)
            for each in reading.workers
            if each.worker.pid
        )
        return NodeHeartbeat(node=self._agent.plan.group.node_rank, host=os.uname().nodename, ranks=ranks)

    def receive(self, member: int, content: bytes) -> None:
        """Handle the heartbeat of another node."""
        self._received[member] = (time.monotonic(), _heartbeats.decode(content))

    def update(self, own: NodeHeartbeat) -> Alarm | None:
        """Combine the progress of all nodes. Return an alarm if the ranks stalled or resumed."""
        if self.tracker is None:
            return None
        members, now, quiet = self._links.members(), time.monotonic(), self.quiet
        self._received = {member: each for member, each in self._received.items() if member in members}
        ranks = list(own.ranks)
        for member, theirs in members.items():
            if member in self._received:
                then, received = self._received[member]
                late = now - then
                known = received.ranks
                if late > quiet:
                    known = tuple(replace(each, silent=each.silent + late) for each in known)
                ranks += known
            elif now - self.tracker.began > _SLOW_START * self._period:
                ranks += [RankProgress(rank=rank, silent=now - self.tracker.began) for rank in theirs]
        return self.tracker.update(now, ranks)

    def last_heartbeat(self, member: int) -> tuple[float, NodeHeartbeat | None]:
        """Return the latest heartbeat of a node, and its time. None: there was none."""
        return self._received.get(member, (0.0, None))
