"""Collects one sample of all ranks per second or period: nodes sample their own ranks, the leader combines them."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.cluster import links
from phalanx.contract import encoding, events
from phalanx.contract.events import NodeRanks, RankSample
from phalanx.contract.messages import worker_messages as words
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.telemetry.metrics import Downsampler, RunMetrics
from phalanx.launcher.telemetry.node_sampler import TENTHS, NodeReading, period
from phalanx.launcher.telemetry.rank_samples import RankSampleBuilder

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchedAgent

_ROOM = 1 << 22  # bytes of samples.jsonl, after which fewer samples are kept
_QUIET = 3.0  # periods: the leader does not wait for a node that was silent for longer
_CLOCK_ERROR = 15  # tenths of a second: if a node's clock is off by more, its samples count as of now


class NodeSamples(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The message that a node sends to the leader every second, or less often: see `node_sampler.period`."""

    tick: int  # tenths of a second, by the leader's clock
    seconds: float
    infos: NodeRanks
    ranks: tuple[RankSample, ...]


@dataclass(frozen=True)
class _Received:
    samples: NodeSamples
    when: float  # seconds of `time.monotonic`


_decoder: encoding.Decoder[NodeSamples] = encoding.Decoder(NodeSamples)


class Collector:
    """Samples the ranks of this node. On the leader, also combines the samples of all nodes and writes them."""

    section = "samples"

    def __init__(self, agent: WatchedAgent, links: NodeLinks, rpc: NodeRpc, folder: RunFolder) -> None:
        self._agent = agent
        self._links = links
        self._folder = folder
        self._builder: RankSampleBuilder | None = None
        self._concluded: object = None  # the attempt of which the last sample was taken
        self._own: NodeSamples | None = None  # not published yet: waits for those of other nodes
        self._received: dict[int, _Received] = {}  # by member
        self._missing: set[int] = set()  # members whose samples of this period are expected
        self._infos: tuple[NodeRanks, ...] = ()
        self._hosts: frozenset[str] = frozenset()
        self._downsampler = Downsampler(_ROOM, 1.0)
        self._metrics = RunMetrics(rpc, folder)
        self._tasks: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """Stop background work."""
        for task in tuple(self._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._metrics.end()

    def measured(self, message: words.MeasuredStep) -> None:
        """Handle metrics from rank 0, which runs on this node."""
        self._metrics.send(message)

    # -- this node

    def observe(self, reading: NodeReading) -> NodeSamples | None:
        """Sample the ranks of this node. On the leader, publish as soon as all nodes have sent theirs."""
        if not reading.due:
            return None
        self._publish()  # the previous period, even if nodes are missing
        attempt = self._agent.attempt
        if attempt is None or attempt is self._concluded:
            return None
        if reading.last:
            self._concluded = attempt
        own = self._sample(reading)
        if self._links.leads:
            self._own, self._missing = own, self._expected(own.tick)
            if reading.last or not self._missing:
                self._publish(last=reading.last)
        if reading.last:
            self._metrics.concluded(attempt)
            self._received.clear()  # other nodes have ended theirs too: their next samples belong to the next attempt
        else:
            self._metrics.read_output(attempt)
        return own

    def _sample(self, reading: NodeReading) -> NodeSamples:
        plan = self._agent.plan
        if self._builder is None or self._builder.attempt is not reading.attempt:
            self._builder = RankSampleBuilder(reading.attempt)
        ranks = frozenset(seat.rank for seat in plan.seats) if not plan.group.spare else frozenset()
        samples = self._builder.build(ranks, reading)
        infos = self._builder.infos(ranks, reading, plan.group.node_rank, os.uname().nodename)
        return NodeSamples(tick=reading.tick, seconds=self._builder.seconds, infos=infos, ranks=samples)

    # -- all nodes, on the leader

    def receive(self, member: int, content: bytes) -> None:
        """Handle the samples of another node. Publish if they were the last ones missing."""
        samples = _decoder.decode(content)
        now = int((time.time() - self._links.skew) * TENTHS)
        ticks = self._period * TENTHS
        if not -_CLOCK_ERROR <= now - samples.tick <= _CLOCK_ERROR + ticks - TENTHS:  # it is sent within the period
            samples = replace(samples, tick=now // ticks * ticks)
        if self._own is not None and samples.tick > self._own.tick:  # other nodes are late
            self._publish()
        self._received[member] = _Received(samples, time.monotonic())
        self._missing.discard(member)
        if not self._missing:
            self._publish()

    @property
    def _period(self) -> int:
        return period(self._agent.plan.group.node_count)

    def _expected(self, tick: int) -> set[int]:
        """Return the members that sent something recently, but not yet for this period."""
        members, now = self._links.members(), time.monotonic()
        self._received = {member: each for member, each in self._received.items() if member in members}
        oldest = now - _QUIET * self._period
        return {member for member, each in self._received.items() if each.samples.tick < tick and each.when > oldest}

    def _publish(self, *, last: bool = False) -> None:
        """Write the samples that have arrived for this period."""
        own, now = self._own, time.monotonic()
        if own is None or not self._links.leads:
            return
        self._own = None
        infos, ranks = [own.infos], list(own.ranks)
        members, quiet = self._links.members(), _QUIET * self._period
        for member, received in self._received.items():
            theirs = members.get(member, ())  # ranks may have moved to another node meanwhile
            infos.append(_assigned(received.samples.infos, theirs))
            ranks += [sample for sample in _extended(received, own.tick, now, quiet) if sample.rank in theirs]
        present = sorted((node for node in infos if node.ranks), key=lambda node: node.ranks[0].rank)
        self._write_infos(tuple(present), own.tick / TENTHS)
        ranks.sort(key=lambda sample: sample.rank)
        counts = [sample.samples for sample in ranks if sample.state not in ("X", "E")]
        self._metrics.samples = round(sum(counts), 1) if counts and min(counts) >= 0 else -1.0
        attempt = self._agent.attempt
        sample = events.ClusterSample(
            time=own.tick / TENTHS,
            seconds=own.seconds,
            generation=attempt.generation if attempt is not None else 0,
            ranks=tuple(ranks),
        )
        kept = self._downsampler.keeps(sample.time, always=last)
        size = self._folder.sample(sample, kept=kept)
        self._downsampler.written += size if kept else 0

    def _write_infos(self, infos: tuple[NodeRanks, ...], when: float) -> None:
        """Write where ranks run, if that changed. `when` is the time of the next sample, which readers see after it."""
        if infos == self._infos:
            return
        self._infos = infos
        self._folder.event(events.RankInfos(time=when, nodes=infos))
        hosts = frozenset(node.host for node in infos)
        if len(hosts) > 1 and hosts != self._hosts:
            self._hosts = hosts
            task = asyncio.get_running_loop().create_task(self._write_links(hosts))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write_links(self, hosts: frozenset[str]) -> None:
        """Write the known links between these hosts. Reads in a thread: the disk may be slow."""
        home = run_folder.home(self._agent.plan.environ)
        known = await asyncio.to_thread(links.known, home, hosts)
        if known is not None:
            measured, pairs = known
            self._folder.event(events.Links(time=time.time(), measured=measured, pairs=pairs))


def _assigned(infos: NodeRanks, ranks: tuple[int, ...]) -> NodeRanks:
    """Return the ranks that this node still has."""
    if tuple(info.rank for info in infos.ranks) == ranks:
        return infos
    return replace(infos, ranks=tuple(info for info in infos.ranks if info.rank in ranks))


def _extended(received: _Received, tick: int, now: float, quiet: float) -> tuple[RankSample, ...]:
    """Return a node's samples for this tick: if it has sent none, its previous ones, marked if it is silent."""
    if received.samples.tick == tick:
        return received.samples.ranks
    late = now - received.when
    silent = round(late, 1) if late > quiet else 0.0
    return tuple(replace(sample, phases="", silent=sample.silent + silent) for sample in received.samples.ranks)
