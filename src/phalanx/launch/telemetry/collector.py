"""What there is to be seen of all ranks, once a second. Every node looks at its own; node 0 puts that together.

All look at whole seconds of node 0's clock, so that what ranks of different nodes were at stands side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from phalanx.cluster import links
from phalanx.contract import encoding, events
from phalanx.contract import worker_messages as words
from phalanx.contract.events import RankInfo, RankSample
from phalanx.launch.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launch.runs import run_folder
from phalanx.launch.runs.run_folder import RunFolder
from phalanx.launch.telemetry.downsampling import Downsampler
from phalanx.launch.telemetry.metrics import RunMetrics
from phalanx.launch.telemetry.rank_sampler import TICKS, RankSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.diagnose.evidence import Gpu
    from phalanx.launch.agent.watched import WatchedAgent
    from phalanx.launch.telemetry.process_stats import ProcessStatsReader

_AFTER = 0.01  # seconds after the full one
_ROOM = 1 << 22  # bytes of samples.jsonl, after which fewer are kept
_QUIET = 3.0  # seconds without a word from a node: it is not waited for
_OFF = 15  # tenths of a second: a node whose clock is still unknown is taken to tell of now


class NodeSamples(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a node tells every second."""

    tick: int  # tenths of a second, by the clock of the one that leads
    seconds: float
    faces: tuple[RankInfo, ...]
    ranks: tuple[RankSample, ...]


@dataclass(frozen=True)
class _Heard:
    seen: NodeSamples
    when: float  # by a clock that nobody sets


_decoder: msgspec.json.Decoder[NodeSamples] = msgspec.json.Decoder(NodeSamples)


class Collector:
    def __init__(
        self,
        agent: WatchedAgent,
        coordinator: RpcCarrier,
        post: NodeRpc,
        folder: RunFolder,
        *,
        vitals: ProcessStatsReader,
        gpus: Mapping[str, Gpu],
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._post = post
        self._folder = folder
        self._vitals = vitals
        self._gpus = gpus  # as others have asked for them
        self._glances: RankSampler | None = None
        self._over: object = None  # the attempt of which all was told
        self._own: NodeSamples | None = None  # not published yet: others have not told theirs
        self._heard: dict[int, _Heard] = {}  # of other nodes
        self._missing: set[int] = set()  # those who are about to
        self._faces: tuple[RankInfo, ...] = ()
        self._hosts: frozenset[str] = frozenset()
        self._thinning = Downsampler(_ROOM, 1.0)
        self._measures = RunMetrics(post, folder)
        self._telling: set[asyncio.Task[None]] = set()
        post.reads("sight", self._told)
        attempt = agent.attempt
        if attempt is not None and attempt.measured is not None:
            self._measures.told(attempt.measured)
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> None:
        for task in (self._task, *self._telling):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._measures.end()

    def measured(self, message: words.MeasuredStep) -> None:
        """By rank 0, which is here."""
        with contextlib.suppress(Exception):
            self._measures.told(message)

    def concluded(self) -> None:
        """The attempt is over here, and its pages are about to go."""
        with contextlib.suppress(Exception):
            self._look(int(self._wall() * TICKS), last=True)
        with contextlib.suppress(Exception):
            self._measures.concluded(self._agent.attempt)
        self._over = self._agent.attempt
        self._heard.clear()  # the others have ended before, and tell of the next one from now on

    # -- of this node

    def _wall(self) -> float:
        return time.time() - self._coordinator.skew

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # what only looks must not end what it looks at
                self._look(int(self._wall()) * TICKS)
            await asyncio.sleep(1.0 - self._wall() % 1.0 + _AFTER)

    def _look(self, tick: int, *, last: bool = False) -> None:
        self._publish()  # of the second before, whoever has not told his part of it
        attempt, plan = self._agent.attempt, self._agent.plan
        if attempt is None or attempt is self._over:
            return
        if self._glances is None or self._glances.of is not attempt:
            self._glances = RankSampler(attempt, self._vitals)
        ranks = frozenset(seat.rank for seat in plan.seats) if not plan.spare else frozenset()
        found = self._glances.take(ranks, tick, now=time.monotonic(), wall=self._wall(), gpus=self._gpus)
        faces = self._glances.faces(ranks, plan.node, os.uname().nodename)
        own = NodeSamples(tick=tick, seconds=self._glances.seconds, faces=faces, ranks=found)
        if self._coordinator.leads:
            self._own, self._missing = own, self._awaited(tick)
            if last or not self._missing:
                self._publish(last=last)
        else:
            self._post.send("sight", 0, encoding.encode(own))
        if not last:
            self._measures.look(attempt)

    # -- of all

    def _told(self, who: int | None, _: int, content: bytes) -> None:
        if who is None:
            return
        with contextlib.suppress(Exception):  # a letter must not cost the one who wrote it his place
            seen = _decoder.decode(content)
            now = int(self._wall() * TICKS)
            if abs(seen.tick - now) > _OFF:
                seen = replace(seen, tick=now // TICKS * TICKS)
            if self._own is not None and seen.tick > self._own.tick:  # others are late, and its part is there
                self._publish()
            self._heard[who] = _Heard(seen, time.monotonic())
            self._missing.discard(who)
            if not self._missing:
                self._publish()

    def _awaited(self, tick: int) -> set[int]:
        """Who has told of the second before, and will of this one in a moment."""
        members, now = self._coordinator.members(), time.monotonic()
        self._heard = {member: heard for member, heard in self._heard.items() if member in members}
        return {member for member, heard in self._heard.items() if heard.seen.tick < tick and now - heard.when < _QUIET}

    def _publish(self, *, last: bool = False) -> None:
        """What there is by now."""
        own, now = self._own, time.monotonic()
        if own is None or not self._coordinator.leads:
            return
        self._own = None
        faces, ranks = list(own.faces), list(own.ranks)
        members = self._coordinator.members()
        for member, heard in self._heard.items():
            theirs = frozenset(members.get(member, ()))  # what it told may be of ranks that are another's by now
            faces += [face for face in heard.seen.faces if face.rank in theirs]
            ranks += [glance for glance in _brought_up(heard, own.tick, now) if glance.rank in theirs]
        self._introduce(tuple(sorted(faces, key=lambda face: face.rank)), own.tick / TICKS)
        ranks.sort(key=lambda glance: glance.rank)
        counts = [glance.samples for glance in ranks if glance.state not in ("X", "E")]
        self._measures.samples = round(sum(counts), 1) if counts and min(counts) >= 0 else -1.0
        attempt = self._agent.attempt
        sight = events.ClusterSample(
            time=own.tick / TICKS,
            seconds=own.seconds,
            generation=attempt.generation if attempt is not None else 0,
            ranks=tuple(ranks),
        )
        kept = self._thinning.keeps(sight.time, anyway=last)
        size = self._folder.sight(sight, kept=kept)
        self._thinning.written += size if kept else 0

    def _introduce(self, faces: tuple[RankInfo, ...], when: float) -> None:
        """`when`: of the sight that follows, so that whoever reads both files later hears of them before it, too."""
        if faces == self._faces:
            return
        self._faces = faces
        self._folder.event(events.RankInfos(time=when, ranks=faces))
        hosts = frozenset(face.host for face in faces)
        if len(hosts) > 1 and hosts != self._hosts:
            self._hosts = hosts
            telling = asyncio.get_running_loop().create_task(self._tell_links(hosts))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell_links(self, hosts: frozenset[str]) -> None:
        """A home may lie on a disk that takes its time."""
        home = run_folder.home(self._agent.plan.environ)
        known = await asyncio.to_thread(links.known, home, hosts)
        if known is not None:
            measured, pairs = known
            self._folder.event(events.Links(time=time.time(), measured=measured, pairs=pairs))


def _brought_up(heard: _Heard, tick: int, now: float) -> tuple[RankSample, ...]:
    """To that moment. Of a node that is silent, what was seen last."""
    if heard.seen.tick == tick:
        return heard.seen.ranks
    late = now - heard.when
    silent = round(late, 1) if late > _QUIET else 0.0
    return tuple(replace(glance, phases="", silent=glance.silent + silent) for glance in heard.seen.ranks)
