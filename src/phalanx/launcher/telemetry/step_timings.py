"""Measures how long each rank spends per step on data, compute and waiting, and names the stragglers.

Only whole, usual steps count: not the time before a rank's first steps or after its last, and no stall.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from phalanx.contract import encoding, events
from phalanx.diagnose.evidence import Gpu
from phalanx.diagnose.rules import stragglers
from phalanx.diagnose.rules.stragglers import Straggler, Total
from phalanx.forkserver.board.status_slot import StatusReading
from phalanx.launcher.ipc.control_messages import QueryRefused, TimingsQuery, TimingsReply
from phalanx.launcher.telemetry.node_sampler import NodeReading

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchContext
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.worker_group import WorkerGroup

_SEND_INTERVAL = 4.9  # seconds between two reports to the leader
_WARMUP_STEPS = 2  # they take longer than the others
_MIN_STEPS = 8  # steps of a rank that must be seen before it is reported as a straggler
_STALL, _STALL_FACTOR = 5.0, 10.0  # seconds, and times the usual duration, from which on a step does not count
_SURE = 4.0  # standard deviations of what was counted: equal ranks differ by less
_OFTEN = 0.25  # share of GPU readings with a slowdown, from which on it is given as the reason
_REPLY_TIMEOUT = 2.0  # seconds for node 0

_totals: encoding.Decoder[tuple[Total, ...]] = encoding.Decoder(tuple[Total, ...])


@dataclass
class RankTiming:
    """Timing of one worker, from its first usual step to its latest."""

    first: StatusReading | None = None
    last: StatusReading | None = None
    gpu_readings: int = 0
    slowdowns: Counter[str] = field(default_factory=Counter)  # reasons for which its GPU was slowed down
    _gpu: Gpu | None = None
    _stalled: bool = False  # the latest step was a stall

    def update(self, now: StatusReading, gpu: Gpu | None = None) -> None:
        """Add a reading. A script whose steps are not visible counts from when it joined the others."""
        if gpu is not None and gpu is not self._gpu:
            self._gpu = gpu
            self.gpu_readings += 1
            if gpu.throttled:
                self.slowdowns[gpu.throttled] += 1
        if not now.looked:  # its probe has not started, or has ended
            return
        if self.first is None:
            started = now.step >= _WARMUP_STEPS or (
                not now.step and now.text.get("phase") not in (None, "import", "join")
            )
            self.first = self.last = now if started else None
        elif not self.first.step and now.step:  # training starts only now
            self.first = self.last = None
        elif self.last is not None and (now.step > self.last.step or not now.step):
            self._leave_out_stall(self.first, self.last, now)
            self.last = now

    def _leave_out_stall(self, first: StatusReading, last: StatusReading, now: StatusReading) -> None:
        """Move the first reading forward by the latest step if that has taken far longer than the others, as with a
        stall or an evaluation. Only once in a row: a rank may become slow for good.
        """
        steps, made = last.step - first.step, now.step - last.step
        usual = (last.looked - first.looked) / max(steps, 1) * made
        long = steps >= _MIN_STEPS and now.looked - last.looked > max(_STALL, _STALL_FACTOR * usual)
        if long and not self._stalled:
            self.first = first._replace(
                step=first.step + made,
                looked=first.looked + now.looked - last.looked,
                looks=first.looks + now.looks - last.looks,
                phases={name: count + now.phases[name] - last.phases[name] for name, count in first.phases.items()},
            )
        self._stalled = long

    def total(self, worker: Worker) -> Total | None:
        """Return how often the worker was seen in each phase, or None if there is nothing to compare yet."""
        if self.first is None or self.last is None or self.last.looks <= self.first.looks:
            return None
        phases = {name: count - self.first.phases[name] for name, count in self.last.phases.items()}
        device = worker.seat.slot.device
        reason, times = self.slowdowns.most_common(1)[0] if self.slowdowns else ("", 0)
        return Total(
            rank=worker.seat.rank,
            samples={name: count for name, count in phases.items() if count > 0},
            steps=self.last.step - self.first.step,
            seconds=self.last.looked - self.first.looked,
            host=os.uname().nodename,
            gpu=device.index if device is not None else None,
            throttled=reason if times and times >= _OFTEN * self.gpu_readings else "",
        )


def late(totals: Sequence[Total]) -> list[Straggler]:
    """Return the certain stragglers: those that differ from the others by more than chance explains."""
    known = comparable(totals)
    found = stragglers.stragglers(known)
    return [one for one in found if _is_certain(one, known)]


def comparable(totals: Sequence[Total]) -> list[Total]:
    """Return the totals to compare: those with steps, if any rank has made one."""
    stepping = [total for total in totals if total.steps]
    return stepping or list(totals)


def _is_certain(one: Straggler, totals: Sequence[Total]) -> bool:
    rows = {row.total.rank: row for row in stragglers.rows(totals)}
    mine = rows[one.rank]
    middle = sorted(rows.values(), key=lambda row: float(getattr(row, one.what)))[(len(rows) - 1) // 2]
    gap = getattr(mine, one.what) - getattr(middle, one.what)
    return bool(gap > _SURE * math.hypot(_deviation(mine, one.what), _deviation(middle, one.what)))


def _deviation(row: stragglers.StragglerRow, what: str) -> float:
    """Return the standard deviation of a time that was estimated by counting looks."""
    seen = sum(row.total.samples.values())
    share = getattr(row, what) / row.whole if row.whole else 0.0
    return row.whole * math.sqrt(max(share * (1 - share), 1 / seen) / seen) if seen else math.inf


class StepTimings:
    """Measures step times of this node's ranks. On the leader, compares the ranks of all nodes."""

    section = "timings"

    def __init__(self, context: WatchContext) -> None:
        self._agent = context.agent
        self._links = context.links
        self._rpc = context.rpc
        self._folder = context.folder
        self._attempt: WorkerGroup | None = None
        self._timings: dict[str, RankTiming] = {}  # by name of the worker
        self._received: dict[int, tuple[Total, ...]] = {}  # by member
        self._sent = time.monotonic()
        context.control.serve(TimingsQuery, self._answer)
        context.rpc.serve("timings", self._answer_node)

    # -- this node

    def observe(self, reading: NodeReading) -> list[Total] | None:
        """Update the timings. Return the totals of this node every few seconds, and at the end of an attempt."""
        if self._agent.attempt is None:
            return None
        if reading.attempt is not self._attempt:
            self._attempt, self._timings = reading.attempt, {}
            self._received.clear()
        if self._links.leads and not reading.attempt.over.is_set():  # a lost node has no ranks any more
            members = self._links.members()
            self._received = {member: totals for member, totals in self._received.items() if member in members}
        for each in reading.workers:
            if each.status is not None:
                self._timings.setdefault(each.name, RankTiming()).update(each.status, each.gpu)
        if not reading.due or (reading.now - self._sent < _SEND_INTERVAL and not reading.last):
            return None
        self._sent = reading.now
        return self._own()

    def _own(self) -> list[Total]:
        if self._attempt is None:
            return []
        pairs = [(self._attempt.workers.get(name), timing) for name, timing in self._timings.items()]
        totals = [timing.total(worker) for worker, timing in pairs if worker is not None]
        return [total for total in totals if total is not None]

    # -- all ranks

    def receive(self, member: int, content: bytes) -> None:
        """Handle the totals of another node."""
        self._received[member] = _totals.decode(content)

    def totals(self) -> list[Total]:
        """Return the totals of all nodes' ranks. Complete on the leader only."""
        others = [total for totals in self._received.values() for total in totals]
        return sorted([*self._own(), *others], key=lambda total: total.rank)

    def final_report(self, *, succeeded: bool) -> str:
        """Return the text for the end of a run: the stragglers, or with --timings the table of all ranks."""
        if not self._links.leads:
            return ""
        totals = self.totals()
        found = late([total for total in totals if total.steps >= _MIN_STEPS])
        requested = self._agent.plan.output.timings
        if not totals or not (requested or (found and succeeded)):
            return ""
        sentences = tuple(one.text for one in found)
        self._folder.event(
            events.StepTimingReport(
                time=time.time(),
                ranks=tuple(map(_event, stragglers.rows(comparable(totals)))),
                slow=tuple(events.SlowRank(rank=one.rank, text=one.text) for one in found),
            )
        )
        heading = sentences or ("time per step of each rank:",)
        return "\n".join([*heading, *(f"  {line}" for line in stragglers.table(comparable(totals)))])

    # -- requests

    async def _answer(self, _: TimingsQuery) -> TimingsReply | QueryRefused:
        totals = await self._all()
        if totals is None:
            return QueryRefused(why="node 0 does not answer")
        known = comparable(totals)
        return TimingsReply(
            ranks=tuple(map(_event, stragglers.rows(known))),
            late=tuple(one.text for one in late(totals)),
            table=tuple(stragglers.table(known)),
        )

    async def _all(self) -> list[Total] | None:
        if self._links.leads:
            return self.totals()
        try:
            return list(_totals.decode(await self._rpc.request("timings", timeout=_REPLY_TIMEOUT)))
        except (TimeoutError, msgspec.DecodeError):
            return None

    async def _answer_node(self, _: int | None, __: bytes) -> bytes:
        return encoding.encode(self.totals())


def _event(row: stragglers.StragglerRow) -> events.StepTiming:
    total = row.total
    return events.StepTiming(
        rank=total.rank,
        steps=total.steps,
        samples=sum(total.samples.values()),
        data=round(row.data, 6),
        compute=round(row.compute, 6),
        waiting=round(row.waiting, 6),
        throttled=total.throttled,
    )
