"""How long each rank takes for data, compute and waiting, from the pages of all nodes: who holds the others up.

What a rank does before its first steps does not count, nor what it does after its last. Other nodes tell node 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from phalanx.contract import events
from phalanx.diagnose.evidence import Gpu
from phalanx.diagnose.rules import stragglers
from phalanx.diagnose.rules.stragglers import Straggler, Total
from phalanx.forkserver import wire
from phalanx.forkserver.probe.status_slot import StatusReading
from phalanx.launch.ipc.control_socket import ControlSocket
from phalanx.launch.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launch.runs.run_folder import RunFolder
from phalanx.launch.telemetry import gpus

if TYPE_CHECKING:
    from phalanx.launch.agent.watched import WatchedAgent
    from phalanx.launch.agent.worker import Worker
    from phalanx.launch.agent.worker_group import WorkerGroup

EVERY = 1.0  # seconds between two looks at the pages
_TELL = 5  # looks between two letters to node 0, and two questions to the driver
_WARM = 2  # steps that are not like the others
_STEPS = 8  # as many must have been seen of a rank, for a word nobody has asked for
_SURE = 4.0  # standard deviations of what was counted: ranks that are alike differ by less
_OFTEN = 0.25  # of the looks at a GPU found it slowed down
_ANSWER = 2.0  # seconds for node 0
_DRIVER = 2.0  # and for the GPUs' driver

_encoder = msgspec.json.Encoder()
_totals: msgspec.json.Decoder[tuple[Total, ...]] = msgspec.json.Decoder(tuple[Total, ...])


@dataclass
class RankTiming:
    """Of one worker: from when its steps are usual to the last of them."""

    first: StatusReading | None = None
    last: StatusReading | None = None
    looks: int = 0  # at its GPU
    reasons: Counter[str] = field(default_factory=Counter)

    def see(self, now: StatusReading) -> None:
        """A script whose steps nobody sees counts from when it has joined the others."""
        if not now.looked:  # nobody looks there, or not any more
            return
        if self.first is None:
            began = now.step >= _WARM or (not now.step and now.text.get("phase") not in (None, "import", "join"))
            self.first = self.last = now if began else None
        elif not self.first.step and now.step:  # it was not trained until now
            self.first = self.last = None
        elif self.last is not None and (now.step > self.last.step or not now.step):
            self.last = now

    def total(self, worker: Worker) -> Total | None:
        if self.first is None or self.last is None or self.last.looks <= self.first.looks:
            return None
        phases = {name: count - self.first.phases[name] for name, count in self.last.phases.items()}
        device = worker.seat.slot.device
        reason, times = self.reasons.most_common(1)[0] if self.reasons else ("", 0)
        return Total(
            rank=worker.seat.rank,
            samples={name: count for name, count in phases.items() if count > 0},
            steps=self.last.step - self.first.step,
            seconds=self.last.looked - self.first.looked,
            host=os.uname().nodename,
            gpu=device.index if device is not None else None,
            throttled=reason if times and times >= _OFTEN * self.looks else "",
        )


def late(totals: Sequence[Total]) -> list[Straggler]:
    """Stragglers of whom it is certain: what was counted is too much for chance."""
    known = comparable(totals)
    found = stragglers.stragglers(known)
    return [one for one in found if _is_certain(one, known)]


def comparable(totals: Sequence[Total]) -> list[Total]:
    """A rank that has only just come says nothing yet about its steps."""
    stepping = [total for total in totals if total.steps]
    return stepping or list(totals)


def _is_certain(one: Straggler, totals: Sequence[Total]) -> bool:
    rows = {row.total.rank: row for row in stragglers.rows(totals)}
    mine = rows[one.rank]
    middle = sorted(rows.values(), key=lambda row: float(getattr(row, one.what)))[(len(rows) - 1) // 2]
    gap = getattr(mine, one.what) - getattr(middle, one.what)
    return bool(gap > _SURE * math.hypot(_doubt(mine, one.what), _doubt(middle, one.what)))


def _doubt(row: stragglers.StragglerRow, what: str) -> float:
    """Of so many looks, so many more or fewer might as well have found it there."""
    seen = sum(row.total.samples.values())
    share = getattr(row, what) / row.whole if row.whole else 0.0
    return row.whole * math.sqrt(max(share * (1 - share), 1 / seen) / seen) if seen else math.inf


class StepTimings:
    def __init__(
        self, agent: WatchedAgent, coordinator: RpcCarrier, post: NodeRpc, desk: ControlSocket, folder: RunFolder
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._post = post
        self._folder = folder
        self._attempt: WorkerGroup | None = None
        self._paces: dict[str, RankTiming] = {}  # by the names of workers
        self.gpus: dict[str, Gpu] = {}  # the same: what the driver has said last
        self._heard: dict[int, tuple[Total, ...]] = {}  # of other nodes
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        desk.answers("paces", self._answer)
        post.reads("pace", self._told)
        post.reads("paces?", lambda who, number, _: post.send("paces", number, _encoder.encode(self.totals()), to=who))
        post.reads("paces", self._answered)
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # -- looking

    async def _watch(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(EVERY)
            with contextlib.suppress(Exception):  # what only looks must not end what it looks at
                self._look()
                if number % _TELL == 0:
                    await self._ask_driver()
                    self._tell()

    def _look(self) -> None:
        attempt = self._agent.attempt
        if attempt is None:
            return
        if attempt is not self._attempt:
            self._attempt, self._paces = attempt, {}
            self.gpus.clear()
            self._heard.clear()
        if self._coordinator.leads and not attempt.over.is_set():  # who is gone has no ranks any more
            members = self._coordinator.members()
            self._heard = {member: totals for member, totals in self._heard.items() if member in members}
        for name, worker in attempt.workers.items():
            if worker.probe is not None and not worker.spare:
                self._paces.setdefault(name, RankTiming()).see(worker.probe.page)

    async def _ask_driver(self) -> None:
        workers = [] if self._attempt is None else [pair for pair in self._attempt.living if pair[0] in self._paces]
        devices = [worker.seat.slot.device for _, worker in workers]
        if not any(devices):
            return
        for (name, _), gpu in zip(workers, await gpus.asked(devices, _DRIVER), strict=True):
            if gpu is not None:
                self.gpus[name] = gpu
                self._paces[name].looks += 1
                if gpu.throttled:
                    self._paces[name].reasons[gpu.throttled] += 1

    def concluded(self) -> None:
        """The attempt is over here, and its pages are about to go."""
        with contextlib.suppress(Exception):
            self._look()
            self._tell()

    # -- all ranks

    def _own(self) -> list[Total]:
        if self._attempt is None:
            return []
        pairs = [(self._attempt.workers.get(name), pace) for name, pace in self._paces.items()]
        totals = [pace.total(worker) for worker, pace in pairs if worker is not None]
        return [total for total in totals if total is not None]

    def _tell(self) -> None:
        if not self._coordinator.leads:
            self._post.send("pace", 0, _encoder.encode(self._own()))

    def _told(self, who: int | None, _: int, content: bytes) -> None:
        if who is not None:
            with contextlib.suppress(msgspec.DecodeError):
                self._heard[who] = _totals.decode(content)

    def totals(self) -> list[Total]:
        """Of all nodes, at the one that leads."""
        others = [total for totals in self._heard.values() for total in totals]
        return sorted([*self._own(), *others], key=lambda total: total.rank)

    def last_words(self, *, well: bool) -> str:
        """For the end of a run: who was slow, or what was asked for."""
        if not self._coordinator.leads:
            return ""
        totals = self.totals()
        found = late([total for total in totals if total.steps >= _STEPS])
        asked = self._agent.plan.output.timings
        if not totals or not (asked or (found and well)):
            return ""
        sentences = tuple(one.text for one in found)
        self._folder.event(
            events.StepTimingReport(
                time=time.time(),
                ranks=tuple(map(_event, stragglers.rows(comparable(totals)))),
                slow=tuple(events.SlowRank(rank=one.rank, text=one.text) for one in found),
            )
        )
        heading = sentences or ("how long each rank took for a step:",)
        return "\n".join([*heading, *(f"  {line}" for line in stragglers.table(comparable(totals)))])

    # -- whoever asks

    async def _answer(self, _: wire.Message, caller: socket.socket) -> None:
        with contextlib.closing(caller):
            totals = await self._all()
            if totals is None:
                said: wire.Message = {"is": "refused", "why": "node 0 does not answer"}
            else:
                known = comparable(totals)
                said = {
                    "is": "paces",
                    "ranks": [msgspec.to_builtins(_event(row)) for row in stragglers.rows(known)],
                    "late": [one.text for one in late(totals)],
                    "table": stragglers.table(known),
                }
            caller.settimeout(_ANSWER)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(wire.send, caller, said)

    async def _all(self) -> list[Total] | None:
        if self._coordinator.leads:
            return self.totals()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._post.send("paces?", number, b"")
        try:
            return list(_totals.decode(await asyncio.wait_for(answer, _ANSWER)))
        except (TimeoutError, msgspec.DecodeError):
            return None
        finally:
            del self._asked[number]

    def _answered(self, _: int | None, number: int, content: bytes) -> None:
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(content)


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
