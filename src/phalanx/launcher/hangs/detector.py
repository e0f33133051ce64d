"""Detects that ranks make no progress, and reports which rank is to blame, where and why.

Every agent has a detector. Followers send the progress of their ranks to the leader. The leader raises the alarm, asks
all nodes for evidence and diagnoses it; a node that does not answer is evidence as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from phalanx.contract import encoding, events
from phalanx.contract.encoding import Decoder
from phalanx.control import join_problems
from phalanx.diagnose import diagnosis, report, words
from phalanx.diagnose.evidence import Evidence, NodeFacts
from phalanx.diagnose.rank_state import LONGER
from phalanx.diagnose.rules import absent
from phalanx.diagnose.rules.timeouts import Timeout
from phalanx.diagnose.verdict import Verdict
from phalanx.errors import LaunchError
from phalanx.forkserver import wire
from phalanx.launcher.agent import out_of_memory
from phalanx.launcher.hangs import node_evidence, stall_dump
from phalanx.launcher.hangs.node_evidence import NodeEvidence
from phalanx.launcher.hangs.progress_tracker import ProgressTracker, RankProgress
from phalanx.launcher.ipc.control_socket import ControlSocket
from phalanx.launcher.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.telemetry import process_stats
from phalanx.launcher.telemetry.node_sampler import INTERVAL, NodeReading
from phalanx.launcher.telemetry.process_stats import ProcessStatsReader

if TYPE_CHECKING:
    from phalanx.launcher.agent.watched import WatchedAgent
    from phalanx.launcher.agent.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_NODE_TIMEOUT = 2.2  # seconds for another node to send its evidence
_SOONEST = 5.0  # seconds between two looks at the same stall
_SLOW_START = 10.0  # seconds for a node to send its first heartbeat
_MAX_ERRORS = 5  # in a row: workers come and go while they are checked
_REACH_TIMEOUT = 0.7  # seconds for a host to answer at all
_QUIET = 3.0  # seconds without a heartbeat from a node whose workers run


class NodeHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sends to the leader every second."""

    node: int
    host: str
    ranks: tuple[RankProgress, ...]


class HangReason(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `phalanx why`."""

    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    report: str


_heartbeats: Decoder[NodeHeartbeat] = Decoder(NodeHeartbeat)
_reasons: Decoder[HangReason] = Decoder(HangReason)
_ranks: Decoder[tuple[int, ...]] = Decoder(tuple[int, ...])


class HangDetector:
    """Watches the progress of ranks, and explains stalls. The leader's detector decides for all nodes."""

    section = "progress"

    def __init__(
        self,
        agent: WatchedAgent,
        coordinator: RpcCarrier,
        rpc: NodeRpc,
        control: ControlSocket,
        folder: RunFolder,
        *,
        stats: ProcessStatsReader,
        attempt: WorkerGroup | None = None,
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._rpc = rpc
        self._folder = folder
        self._stats = stats
        self._kills = out_of_memory.read()
        self._tracker: ProgressTracker | None = None
        self._attempt = attempt  # the latest: it may be over already
        self._received: dict[int, tuple[float, NodeHeartbeat]] = {}  # by member: when, and what
        self._stalls = itertools.count(1)
        self._stalled: tuple[float, str] | None = None  # since when, and what to say about it at the end of the run
        self._recheck: float | None = None  # an alarm without a verdict: when to diagnose again
        self._alarm_task: asyncio.Task[None] | None = None
        self._errors = 0  # in a row
        self._paused_until = 0.0
        self._gathering = asyncio.Lock()  # all stacks of a worker are written into one file
        self._tasks: set[asyncio.Task[None]] = set()
        control.serve("why", self._answer)
        rpc.serve("evidence", self._answer_evidence)
        rpc.serve("why", self._answer_why)
        rpc.on("kill", self._kill_received)
        rpc.on("verdict", self._verdict_received)

    async def end(self) -> None:
        """Stop background work."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def final_report(self) -> str:
        """Return why the run was stalled when it ended. Empty if it was not."""
        return self._stalled[1] if self._stalled is not None else ""

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- progress

    def observe(self, reading: NodeReading) -> NodeHeartbeat | None:
        """Return the heartbeat of this node. On the leader, check the progress of all ranks."""
        diagnosing = self._alarm_task is not None and not self._alarm_task.done()
        disabled = self._errors >= _MAX_ERRORS or reading.now < self._paused_until
        if reading.last or diagnosing or disabled:
            return None
        try:
            heartbeat = self._check(reading)
        except Exception as error:
            self._failed(error)
            return None
        if self._alarm_task is None or self._alarm_task.done():
            self._errors = 0
        return heartbeat

    def _failed(self, error: Exception) -> None:
        """Pause for longer after every error, and give up after several: watching must not disturb the run."""
        logger.debug("hang detection failed", exc_info=error)
        self._errors += 1
        self._paused_until = time.monotonic() + INTERVAL * (1 + self._errors) ** 3
        if self._errors == _MAX_ERRORS:
            self._agent.note(f"hang detection disabled after {_MAX_ERRORS} errors: {error!r}")

    def _check(self, reading: NodeReading) -> NodeHeartbeat | None:
        self._attempt = attempt = reading.attempt
        plan, members, now = self._agent.plan, self._coordinator.members(), time.monotonic()
        # Ranks of other nodes may still run, and stall, after ours have ended.
        if (
            attempt.stopping
            or attempt.ending
            or attempt.held
            or (self._coordinator.leads and attempt.over.is_set() and not members)
        ):
            self._tracker = None
            return None
        tracker = self._tracker
        if tracker is None or tracker.generation != (attempt.number, attempt.generation):
            tracker = self._tracker = ProgressTracker((attempt.number, attempt.generation), plan.hang.stall_timeout)
            self._stalled = self._recheck = None
        heartbeat = self._heartbeat(reading, tracker)
        if not self._coordinator.leads:
            return heartbeat
        self._received = {member: each for member, each in self._received.items() if member in members}
        ranks = list(heartbeat.ranks)
        for member, theirs in members.items():
            if member in self._received:
                then, received = self._received[member]
                late = now - then if now - then > _QUIET else 0.0
                ranks += [replace(each, silent=each.silent + late) for each in received.ranks]
            elif now - tracker.began > _SLOW_START:
                ranks += [RankProgress(rank=rank, silent=now - tracker.began) for rank in theirs]
        alarm = tracker.update(now, ranks)
        if plan.hang.stall_timeout is None:
            return heartbeat
        if alarm is not None and alarm.what == "resumed":
            self._resumed()
        elif alarm is not None or (self._recheck is not None and now > self._recheck):
            self._recheck = None
            self._alarm_task = self._start(self._alarm(attempt, plan.hang.stall_timeout))
        return heartbeat

    def _heartbeat(self, reading: NodeReading, tracker: ProgressTracker) -> NodeHeartbeat:
        """Return the progress of all started workers of this node, dead ones included."""
        ranks = tuple(
            tracker.measure(each, debugged=each.worker.seat.rank in reading.attempt.debugged)
            for each in reading.workers
            if each.worker.pid
        )
        return NodeHeartbeat(node=self._agent.plan.node, host=os.uname().nodename, ranks=ranks)

    def receive(self, member: int, content: bytes) -> None:
        """Take the heartbeat of another node."""
        self._received[member] = (time.monotonic(), _heartbeats.decode(content))

    # -- orders of the leader

    def _kill_received(self, who: int | None, _: int, content: bytes) -> None:
        if who is None:
            self._kill(_ranks.decode(content))

    def _verdict_received(self, who: int | None, _: int, content: bytes) -> None:
        if who is None:
            self._agent.say(content.decode(errors="replace"))

    # -- alarms

    async def _alarm(self, attempt: WorkerGroup, stall_timeout: float) -> None:
        try:
            await self._diagnose(attempt, stall_timeout)
        except Exception as error:
            self._failed(error)

    async def _diagnose(self, attempt: WorkerGroup, stall_timeout: float) -> None:
        evidence, verdicts = await self.explain()
        if attempt is not self._attempt or attempt.stopping:
            return
        if not verdicts:  # slow rather than stuck; if it lasts, there will be more to see
            self._recheck = time.monotonic() + max(stall_timeout, _SOONEST)
            return
        path = await asyncio.to_thread(stall_dump.write, self._folder.path, next(self._stalls), evidence, verdicts)
        self._folder.event(events.Stalled(time=time.time(), seconds=round(evidence.waited, 1), folder=path))
        for verdict in verdicts:
            self._folder.event(
                events.VerdictEvent(time=time.time(), kind=verdict.kind, text=verdict.text, ranks=verdict.ranks)
            )
        text = report.text(evidence, verdicts)
        short = "\n".join(f"  {verdict.text}" for verdict in verdicts)
        self._stalled = (time.monotonic() - evidence.waited, f"the run was stalled when it ended:\n{short}")
        self._say(f"{text}\n  stacks and all evidence: {path}" if path else text)
        self._act(evidence, verdicts)

    def _say(self, text: str) -> None:
        """Print on all nodes."""
        self._agent.say(text)
        for member in self._coordinator.members():
            self._rpc.send("verdict", 0, text.encode(), to=member)

    def _resumed(self) -> None:
        self._recheck = None
        if self._stalled is None:
            return
        seconds, self._stalled = time.monotonic() - self._stalled[0], None
        self._folder.event(events.Resumed(time=time.time(), seconds=round(seconds, 1)))
        self._say(f"the run resumed after {seconds:.0f} s")

    def _act(self, evidence: Evidence, verdicts: list[Verdict]) -> None:
        """Do what --on-hang says."""
        action = self._agent.plan.hang.action
        if action != "report" and verdicts[0].kind == "loop" and evidence.waited < LONGER * evidence.limit:
            wait = LONGER * evidence.limit - evidence.waited
            self._agent.note(f"the rank may only be slow: --on-hang {action} waits another {wait:.0f} s")
            self._recheck = time.monotonic() + wait
            return
        match action:
            case "stop":
                why = f"the run is stalled and was stopped (--on-hang stop): {verdicts[0].text}"
                self._agent.fail(LaunchError(why, fix=verdicts[0].fix))
            case "kill":
                living = {rank.rank for rank in evidence.ranks if rank.ended is None}
                blamed = (set(verdict.ranks) & living for verdict in verdicts)
                culprits = next(filter(None, blamed), set[int]())
                if not culprits:
                    self._agent.note("no living rank is to blame: none is killed (--on-hang kill)")
                self._kill(tuple(culprits))
                for member, ranks in self._coordinator.members().items():
                    theirs = tuple(rank for rank in ranks if rank in culprits)
                    if theirs:
                        self._agent.note(f"{words.who(theirs)} stalled: SIGKILL by its node (--on-hang kill)")
                        self._rpc.send("kill", 0, encoding.encode(theirs), to=member)

    def _kill(self, ranks: tuple[int, ...]) -> None:
        attempt = self._agent.attempt
        for name, worker in attempt.living if attempt is not None else ():
            if worker.seat.rank in ranks and not worker.spare and attempt is not None:
                self._agent.note(f"rank {worker.seat.rank} {root_cause.HUNG}")
                worker.hung = True
                attempt.send_signal(name, signal.SIGKILL)

    # -- evidence

    async def explain(self) -> tuple[Evidence, list[Verdict]]:
        """Gather the evidence of all nodes now, and diagnose it."""
        evidence = await self._gather()
        if self._held:  # the ranks are supposed to wait
            return evidence, []
        return evidence, await asyncio.to_thread(diagnosis.diagnose, evidence)

    async def blame(self, rank: int, timeout: Timeout) -> list[str]:
        """Return lines that say which rank made this one time out, by the current evidence of all nodes."""
        reason = await self._reason()
        if reason is None:
            return []
        lines = await asyncio.to_thread(absent.blame, reason.evidence, rank, timeout)
        if lines:  # the final report would repeat it
            self._stalled = None
        return lines

    @property
    def _held(self) -> str:
        attempt = self._agent.attempt
        return attempt.held if attempt is not None else ""

    async def _gather(self) -> Evidence:
        plan = self._agent.plan
        members = {member: ranks for member, ranks in self._coordinator.members().items() if ranks}
        loop = asyncio.get_running_loop()
        replies = {
            member: loop.create_task(self._rpc.request("evidence", to=member, timeout=node_evidence.LONGEST))
            for member in members
        }
        own = asyncio.create_task(self._own_evidence())
        try:
            await self._wait_for(replies)
            found = [await own]
            for member, reply in replies.items():
                found.append(await self._evidence_of(member, members[member], reply))
        finally:
            for reply in replies.values():
                reply.cancel()
        ranks = [rank for each in found for rank in each.ranks]
        if self._tracker is not None:
            ranks = list(map(self._tracker.complete, ranks))
        return Evidence(
            time=time.time(),
            waited=round(self._tracker.waited, 1) if self._tracker is not None else 0.0,
            ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
            nodes=tuple(each.node for each in found),
            world_size=plan.placement.world_size,
            limit=plan.hang.stall_timeout or 30.0,
        )

    async def _wait_for(self, replies: dict[int, asyncio.Task[bytes]]) -> None:
        if not replies:
            return
        await asyncio.wait(replies.values(), timeout=_NODE_TIMEOUT)
        # A node that still sends heartbeats may need longer, because its own ranks do not answer.
        recent = time.monotonic() - _QUIET
        slow = [reply for who, reply in replies.items() if not reply.done() and self._last_heartbeat(who) > recent]
        if slow:
            await asyncio.wait(slow, timeout=node_evidence.LONGEST - _NODE_TIMEOUT)

    def _last_heartbeat(self, member: int) -> float:
        return self._received[member][0] if member in self._received else 0.0

    async def _evidence_of(self, member: int, ranks: tuple[int, ...], reply: asyncio.Task[bytes]) -> NodeEvidence:
        """Return the evidence that a node sent, or what is known about it without that."""
        if reply.done():
            with contextlib.suppress(TimeoutError, msgspec.DecodeError):
                return node_evidence.decode(reply.result())
        then, heartbeat = self._received.get(member, (0.0, None))
        began = self._tracker.began if self._tracker is not None else time.monotonic() - _NODE_TIMEOUT
        silent = time.monotonic() - (then if heartbeat is not None else began)
        node = NodeFacts(
            node=heartbeat.node if heartbeat is not None else member,
            host=heartbeat.host if heartbeat is not None else "",
            silent=silent,
            lost=member not in self._coordinator.members(),
            finding=await self._route(member),
        )
        return node_evidence.of_silent_node(node, ranks, f"its node has not answered for {silent:.0f} s")

    async def _route(self, member: int) -> str:
        """Return what is wrong with the route to a member, if anything."""
        address = self._coordinator.address(member)
        return await join_problems.way(address, timeout=_REACH_TIMEOUT) if address else ""

    async def _answer_evidence(self, _: int | None, __: bytes) -> bytes:
        return node_evidence.encode(await self._own_evidence())

    async def _own_evidence(self) -> NodeEvidence:
        total, available = process_stats.host_memory()
        node = NodeFacts(
            node=self._agent.plan.node,
            host=os.uname().nodename,
            memory=total,
            available=available,
            swapping=round(self._stats.swapping(), 1),
            out_of_memory=out_of_memory.read().since(self._kills),
        )
        attempt = self._agent.attempt or self._attempt
        if attempt is None:
            return NodeEvidence(node=node, ranks=())
        async with self._gathering:
            return await node_evidence.take(attempt, self._stats, node)

    # -- requests

    async def _answer(self, _: wire.Message) -> wire.Message:
        """Answer `phalanx why`."""
        reason = await self._reason()
        if reason is None:
            return {"is": "refused", "why": "node 0 does not answer"}
        return {"is": "why", **msgspec.to_builtins(reason)}

    async def _reason(self) -> HangReason | None:
        """Diagnose on the leader; elsewhere, ask the leader. None: it does not answer."""
        if self._coordinator.leads:
            evidence, verdicts = await self.explain()
            text = report.text(evidence, verdicts)
            if self._held:
                text = f"too few nodes are left: the ranks wait for others to join ({self._held})\n\n{text}"
            return HangReason(evidence=evidence, verdicts=tuple(verdicts), report=text)
        try:
            return _reasons.decode(await self._rpc.request("why", timeout=_NODE_TIMEOUT + node_evidence.LONGEST))
        except (TimeoutError, msgspec.DecodeError):
            return None

    async def _answer_why(self, _: int | None, __: bytes) -> bytes | None:
        reason = await self._reason()
        return None if reason is None else encoding.encode(reason)
