"""Looks twice a second whether the ranks go on. When they do not, it says who is wrong, where and why.

Every agent has one. Those of other nodes tell node 0's what they see; that one decides, and asks all of them for
what they know when there is an alarm. One that does not answer is evidence as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from phalanx.contract import encoding, events
from phalanx.control import join_problems
from phalanx.diagnose import diagnosis, report, words
from phalanx.diagnose.evidence import Evidence, NodeFacts
from phalanx.diagnose.rank_state import LONGER
from phalanx.diagnose.rules import absent
from phalanx.diagnose.rules.timeouts import Timeout
from phalanx.diagnose.verdict import Verdict
from phalanx.errors import LaunchError
from phalanx.forkserver import wire
from phalanx.launch.agent import out_of_memory
from phalanx.launch.hangs import node_evidence, stall_dump
from phalanx.launch.hangs.node_evidence import NodeEvidence
from phalanx.launch.ipc.control_socket import ControlSocket
from phalanx.launch.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launch.runs import root_cause
from phalanx.launch.runs.run_folder import RunFolder
from phalanx.launch.telemetry import process_stats
from phalanx.launch.telemetry.progress import ProgressLook, ProgressTracker

if TYPE_CHECKING:
    from phalanx.launch.agent.watched import WatchedAgent
    from phalanx.launch.agent.worker_group import WorkerGroup

EVERY = 0.5  # seconds between two looks
_PULSE = 0.9  # seconds, at least, between two letters about them
_ANSWER = 2.2  # for another node to tell
_SOONEST = 5.0  # seconds between two looks into the same
_SLOW = 10.0  # seconds for a node to begin to tell anything
_TIMES = 5  # that a look may fail, one after the other: ranks come and go while they are looked at
_REACH = 0.7  # for a machine to answer at all
_QUIET = 3.0  # seconds without a word from a node whose workers run


class NodeHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells every second."""

    node: int
    host: str
    looks: tuple[ProgressLook, ...]


class HangReason(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `why`."""

    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    report: str


_pulses: msgspec.json.Decoder[NodeHeartbeat] = msgspec.json.Decoder(NodeHeartbeat)
_answers: msgspec.json.Decoder[HangReason] = msgspec.json.Decoder(HangReason)
_ranks: msgspec.json.Decoder[tuple[int, ...]] = msgspec.json.Decoder(tuple[int, ...])


class HangDetector:
    def __init__(
        self,
        agent: WatchedAgent,
        coordinator: RpcCarrier,
        post: NodeRpc,
        desk: ControlSocket,
        folder: RunFolder,
        *,
        attempt: WorkerGroup | None = None,
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._post = post
        self._folder = folder
        self.vitals = self._vitals = process_stats.ProcessStatsReader()
        self._kills = out_of_memory.read()
        self._watched: ProgressTracker | None = None
        self._attempt = attempt  # the last there was: it may be over already
        self._heard: dict[int, tuple[float, NodeHeartbeat]] = {}  # of other nodes: when, and what
        self._numbers = itertools.count(1)
        self._asked: dict[tuple[int | None, int], asyncio.Future[bytes]] = {}  # of whom, which question
        self._stalls = itertools.count(1)
        self._standing: tuple[float, str] | None = None  # since when, and what to say of it in the end
        self._pulsed = 0.0  # when node 0 was last told what is seen here
        self._unclear: float | None = None  # there was an alarm, and nobody to blame: when to look again
        self._looking = asyncio.Lock()  # stacks of a rank are written into one file
        self._tasks: set[asyncio.Task[None]] = set()
        desk.answers("why", self._answer)
        post.reads("pulse", self._pulse)
        post.reads("testify", lambda _, number, __: self._begin(self._testify(number)))
        post.reads("testimony", self._answered)
        post.reads("why", lambda who, number, _: self._begin(self._because(who, number)))
        post.reads("because", self._answered)
        post.reads("kill", self._told_to_kill)
        post.reads("verdict", self._told_verdict)
        self._begin(self._watch())

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def last_words(self) -> str:
        """Of a run that ends while nobody went on: why that was."""
        return self._standing[1] if self._standing is not None else ""

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- looking

    async def _watch(self) -> None:
        failed = 0
        while failed < _TIMES:
            await asyncio.sleep(EVERY * (1 + failed) ** 3)
            try:
                await self._look()
            except Exception as error:  # what only looks must not end what it looks at
                failed += 1
                last = error
            else:
                failed = 0
        self._agent.note(f"it is not looked any more whether ranks go on: {last!r}")

    async def _look(self) -> None:
        self._attempt = attempt = self._agent.attempt or self._attempt
        plan, members, now = self._agent.plan, self._coordinator.members(), time.monotonic()
        # Ranks of other nodes may go on, and stand still, when ours have ended.
        if (
            attempt is None
            or attempt.stopping
            or attempt.ending
            or attempt.held
            or (self._coordinator.leads and attempt.over.is_set() and not members)
        ):
            self._watched = None
            return
        if self._watched is None or self._watched.of != (attempt.number, attempt.generation):
            self._watched = ProgressTracker((attempt.number, attempt.generation), plan.hang.stall_timeout)
            self._standing = self._unclear = None
        own = self._own(attempt, self._watched)
        if not self._coordinator.leads:
            if now - self._pulsed > _PULSE:
                self._pulsed = now
                self._post.send("pulse", 0, encoding.encode(own))
            return
        self._heard = {member: heard for member, heard in self._heard.items() if member in members}
        looks = list(own.looks)
        for member, ranks in members.items():
            if member in self._heard:
                then, pulse = self._heard[member]
                late = now - then if now - then > _QUIET else 0.0
                looks += [replace(look, silent=look.silent + late) for look in pulse.looks]
            elif now - self._watched.began > _SLOW:
                looks += [ProgressLook(rank=rank, silent=now - self._watched.began) for rank in ranks]
        alarm = self._watched.see(now, looks)
        if plan.hang.stall_timeout is None:
            return
        if alarm is not None and alarm.what == "resumed":
            self._resumed()
        elif alarm is not None or (self._unclear is not None and now > self._unclear):
            self._unclear = None
            await self._alarm(attempt, plan.hang.stall_timeout)

    def _own(self, attempt: WorkerGroup, watched: ProgressTracker) -> NodeHeartbeat:
        """Of this node, the dead too."""
        self._vitals.forget({worker.pid for _, worker in attempt.living})
        workers = [worker for worker in attempt.workers.values() if not worker.spare]
        looks = tuple(
            watched.look(worker, self._vitals.pulse(worker.pid), debugged=worker.seat.rank in attempt.debugged)
            if worker.code is None
            else ProgressLook(rank=worker.seat.rank, state="X")
            for worker in workers
            if worker.pid
        )
        return NodeHeartbeat(node=self._agent.plan.node, host=os.uname().nodename, looks=looks)

    def _pulse(self, who: int | None, _: int, content: bytes) -> None:
        if who is not None:
            with contextlib.suppress(msgspec.DecodeError):
                self._heard[who] = (time.monotonic(), _pulses.decode(content))

    # -- what node 0 orders, and nobody else

    def _told_to_kill(self, who: int | None, _: int, content: bytes) -> None:
        if who is None:
            self._kill(_ranks.decode(content))

    def _told_verdict(self, who: int | None, _: int, content: bytes) -> None:
        if who is None:
            self._agent.say(content.decode(errors="replace"))

    # -- telling

    async def _alarm(self, attempt: WorkerGroup, after: float) -> None:
        evidence, verdicts = await self.explain()
        if attempt is not self._attempt or attempt.stopping:
            return
        if not verdicts:  # slow, and not stuck; if it lasts, more will be seen
            self._unclear = time.monotonic() + max(after, _SOONEST)
            return
        path = await asyncio.to_thread(stall_dump.write, self._folder.path, next(self._stalls), evidence, verdicts)
        self._folder.event(events.Stalled(time=time.time(), seconds=round(evidence.waited, 1), folder=path))
        for verdict in verdicts:
            told = events.VerdictEvent(time=time.time(), kind=verdict.kind, text=verdict.text, ranks=verdict.ranks)
            self._folder.event(told)
        text = report.text(evidence, verdicts)
        short = "\n".join(f"  {verdict.text}" for verdict in verdicts)
        self._standing = (time.monotonic() - evidence.waited, f"no rank went on when the run ended:\n{short}")
        self._say(f"{text}\n  stacks, and all that is known: {path}" if path else text)
        self._act(evidence, verdicts)

    def _say(self, text: str) -> None:
        """On all nodes."""
        self._agent.say(text)
        for member in self._coordinator.members():
            self._post.send("verdict", 0, text.encode(), to=member)

    def _resumed(self) -> None:
        self._unclear = None
        if self._standing is None:
            return
        seconds, self._standing = time.monotonic() - self._standing[0], None
        self._folder.event(events.Resumed(time=time.time(), seconds=round(seconds, 1)))
        self._say(f"the run goes on, after {seconds:.0f} s")

    def _act(self, evidence: Evidence, verdicts: list[Verdict]) -> None:
        then = self._agent.plan.hang.action
        if then != "report" and verdicts[0].kind == "loop" and evidence.waited < LONGER * evidence.limit:
            wait = LONGER * evidence.limit - evidence.waited
            self._agent.note(f"it may only be slow: --on-hang {then} waits another {wait:.0f} s")
            self._unclear = time.monotonic() + wait
            return
        match then:
            case "stop":
                why = f"the run stands still, and is ended (--on-hang stop): {verdicts[0].text}"
                self._agent.fail(LaunchError(why, fix=verdicts[0].fix))
            case "kill":
                living = {rank.rank for rank in evidence.ranks if rank.ended is None}
                blamed = (set(verdict.ranks) & living for verdict in verdicts)
                culprits = next(filter(None, blamed), set[int]())
                if not culprits:
                    self._agent.note("nobody who still runs is to blame: nobody is killed (--on-hang kill)")
                self._kill(tuple(culprits))
                for member, ranks in self._coordinator.members().items():
                    theirs = tuple(rank for rank in ranks if rank in culprits)
                    if theirs:
                        self._agent.note(f"{words.who(theirs)} stands still: SIGKILL by its node (--on-hang kill)")
                        self._post.send("kill", 0, encoding.encode(theirs), to=member)

    def _kill(self, ranks: tuple[int, ...]) -> bool:
        attempt, found = self._agent.attempt, False
        for name, worker in attempt.living if attempt is not None else ():
            if worker.seat.rank in ranks and not worker.spare and attempt is not None:
                self._agent.note(f"rank {worker.seat.rank} {root_cause.HUNG}")
                worker.hung = found = True
                attempt.tell(name, signal.SIGKILL)
        return found

    # -- evidence

    async def explain(self) -> tuple[Evidence, list[Verdict]]:
        """Of all nodes, now."""
        evidence = await self._gather()
        if self._held:  # whoever waits, is meant to
            return evidence, []
        return evidence, await asyncio.to_thread(diagnosis.diagnose, evidence)

    async def blame(self, rank: int, timeout: Timeout) -> list[str]:
        """Who made this rank time out, by what all nodes know now: lines."""
        because = await self._why()
        if because is None:
            return []
        lines = await asyncio.to_thread(absent.blame, because.evidence, rank, timeout)
        if lines:  # what is told in the end says it again
            self._standing = None
        return lines

    @property
    def _held(self) -> str:
        attempt = self._agent.attempt
        return attempt.held if attempt is not None else ""

    async def _gather(self) -> Evidence:
        plan = self._agent.plan
        members = {member: ranks for member, ranks in self._coordinator.members().items() if ranks}
        number = next(self._numbers)
        waiting = {member: self._ask(member, "testify", number) for member in members}
        own = asyncio.create_task(self._testimony())
        if waiting:
            await asyncio.wait(waiting.values(), timeout=_ANSWER)
            # A node that is there, and not yet through with all that it asks.
            recent = time.monotonic() - _QUIET
            slow = [answer for who, answer in waiting.items() if not answer.done() and self._last(who) > recent]
            if slow:
                await asyncio.wait(slow, timeout=node_evidence.LONGEST - _ANSWER)
        found = [await own]
        for member, answer in waiting.items():
            del self._asked[member, number]
            found.append(await self._told(member, members[member], answer))
        ranks = [rank for each in found for rank in each.ranks]
        if self._watched is not None:
            ranks = list(map(self._watched.complete, ranks))
        return Evidence(
            time=time.time(),
            waited=round(self._watched.waited, 1) if self._watched is not None else 0.0,
            ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
            nodes=tuple(each.node for each in found),
            world_size=plan.placement.world_size,
            limit=plan.hang.stall_timeout or 30.0,
        )

    def _ask(self, member: int | None, kind: str, number: int) -> asyncio.Future[bytes]:
        answer = self._asked[member, number] = asyncio.get_running_loop().create_future()
        self._post.send(kind, number, b"", to=member)
        return answer

    def _answered(self, who: int | None, number: int, content: bytes) -> None:
        answer = self._asked.get((who, number))
        if answer is not None and not answer.done():
            answer.set_result(content)

    def _last(self, member: int) -> float:
        """When it was last heard."""
        return self._heard[member][0] if member in self._heard else 0.0

    async def _told(self, member: int, ranks: tuple[int, ...], answer: asyncio.Future[bytes]) -> NodeEvidence:
        """What a node has told; else what is known of it without that."""
        if answer.done():
            with contextlib.suppress(msgspec.DecodeError):
                return node_evidence.decode(answer.result())
        answer.cancel()
        then, pulse = self._heard.get(member, (0.0, None))
        began = self._watched.began if self._watched is not None else time.monotonic() - _ANSWER
        silent = time.monotonic() - (then if pulse is not None else began)
        node = NodeFacts(
            node=pulse.node if pulse is not None else member,
            host=pulse.host if pulse is not None else "",
            silent=silent,
            lost=member not in self._coordinator.members(),
            finding=await self._way(member),
        )
        why = f"its node has not answered for {silent:.0f} s"
        return node_evidence.silent(node, ranks, why)

    async def _way(self, member: int) -> str:
        address = self._coordinator.address(member)
        return await join_problems.way(address, timeout=_REACH) if address else ""

    async def _testify(self, number: int) -> None:
        self._post.send("testimony", number, node_evidence.encode(await self._testimony()))

    async def _testimony(self) -> NodeEvidence:
        """Of this node."""
        total, available = process_stats.machine()
        node = NodeFacts(
            node=self._agent.plan.node,
            host=os.uname().nodename,
            memory=total,
            available=available,
            swapping=round(self._vitals.swapping(), 1),
            out_of_memory=out_of_memory.read().since(self._kills),
        )
        attempt = self._agent.attempt or self._attempt
        if attempt is None:
            return NodeEvidence(node=node, ranks=())
        async with self._looking:
            return await node_evidence.take(attempt, self._vitals, node)

    # -- whoever asks

    async def _answer(self, _: wire.Message, caller: socket.socket) -> None:
        """At the desk. Who does not lead asks who does."""
        with contextlib.closing(caller):
            because = await self._why()
            if because is None:
                said: wire.Message = {"is": "refused", "why": "node 0 does not answer"}
            else:
                said = {"is": "why", **msgspec.to_builtins(because)}
            caller.settimeout(5.0)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(wire.send, caller, said)

    async def _why(self) -> HangReason | None:
        if self._coordinator.leads:
            evidence, verdicts = await self.explain()
            text = report.text(evidence, verdicts)
            if self._held:
                text = f"too few nodes are left, and the ranks wait for others ({self._held})\n\n{text}"
            return HangReason(evidence=evidence, verdicts=tuple(verdicts), report=text)
        number = next(self._numbers)
        answer = self._ask(None, "why", number)
        try:
            return _answers.decode(await asyncio.wait_for(answer, _ANSWER + node_evidence.LONGEST))
        except (TimeoutError, msgspec.DecodeError):
            return None
        finally:
            del self._asked[None, number]

    async def _because(self, who: int | None, number: int) -> None:
        because = await self._why()
        if because is not None:
            self._post.send("because", number, encoding.encode(because), to=who)
