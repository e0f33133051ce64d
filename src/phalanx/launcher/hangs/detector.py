"""Detects that ranks make no progress, and reports which rank is to blame, where and why.

Every agent has a detector. Followers send the progress of their ranks to the leader. The leader raises the alarm,
requests evidence from all nodes and diagnoses it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from typing import TYPE_CHECKING

import msgspec

from phalanx.contract import encoding, events
from phalanx.contract.encoding import Decoder
from phalanx.diagnose import absent, diagnosis, report, words
from phalanx.diagnose.evidence import Evidence
from phalanx.diagnose.rules.collectives.timeouts import Timeout
from phalanx.diagnose.verdict import Verdict
from phalanx.errors import LaunchError
from phalanx.launcher.evidence import stall_dump
from phalanx.launcher.hangs import hang_action, node_evidence
from phalanx.launcher.hangs.cluster_progress import ClusterProgress, NodeHeartbeat
from phalanx.launcher.hangs.evidence_gatherer import NODE_TIMEOUT, EvidenceGatherer
from phalanx.launcher.hangs.hang_action import FormAgain, KillRanks, StopRun, WaitLonger
from phalanx.launcher.ipc.control_messages import QueryRefused, WhyQuery, WhyReply
from phalanx.launcher.runs import root_cause
from phalanx.launcher.telemetry.node_sampler import INTERVAL, NodeReading
from phalanx.launcher.telemetry.process_stats import ProcessStatsReader

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchContext
    from phalanx.launcher.workers.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

_SOONEST = 5.0  # seconds between two diagnoses of the same stall
_FORM_AGAIN = 2  # how often a group that stalls before its first step is formed again
_MAX_ERRORS = 5  # consecutive errors: workers come and go while they are checked


_reasons: Decoder[WhyReply] = Decoder(WhyReply)
_ranks: Decoder[tuple[int, ...]] = Decoder(tuple[int, ...])


class ErrorBackoff:
    """Pauses for longer after every error in a row, and gives up after several."""

    def __init__(self) -> None:
        self._errors = 0
        self._until = 0.0

    def allows(self, now: float) -> bool:
        """Return whether to try."""
        return self._errors < _MAX_ERRORS and now >= self._until

    def failed(self, now: float) -> bool:
        """Record an error. Return whether that was the last attempt."""
        self._errors += 1
        self._until = now + INTERVAL * (1 + self._errors) ** 3
        return self._errors == _MAX_ERRORS

    def succeeded(self) -> None:
        """Clear earlier errors."""
        self._errors = 0


class HangDetector:
    """Watches the progress of ranks, and explains stalls. The leader's detector decides for all nodes."""

    section = "progress"

    def __init__(self, context: WatchContext, *, stats: ProcessStatsReader, attempt: WorkerGroup | None = None) -> None:
        self._agent = context.agent
        self._links = context.links
        self._rpc = context.rpc
        self._folder = context.folder
        self._progress = ClusterProgress(context.agent, context.links, attempt)
        self._evidence = EvidenceGatherer(context, self._progress, stats)
        self._backoff = ErrorBackoff()
        self._stalls = itertools.count(1)
        self._stalled: tuple[float, str] | None = None  # start of the stall, and the text for the end of the run
        self._formed_again = 0  # how often since the last committed step
        self._recheck: float | None = None  # an alarm without a verdict: when to diagnose again
        self._alarm_task: asyncio.Task[None] | None = None
        context.control.serve(WhyQuery, self._answer)
        self._rpc.serve("why", self._answer_node)
        self._rpc.on("kill", self._kill_received)
        self._rpc.on("verdict", self._verdict_received)

    async def end(self) -> None:
        """Stop background work."""
        if self._alarm_task is not None:
            self._alarm_task.cancel()
            await asyncio.gather(self._alarm_task, return_exceptions=True)

    @property
    def final_report(self) -> str:
        """Return why the run was stalled when it ended. Empty if it was not."""
        return self._stalled[1] if self._stalled is not None else ""

    # -- progress

    @property
    def _diagnosing(self) -> bool:
        return self._alarm_task is not None and not self._alarm_task.done()

    def observe(self, reading: NodeReading) -> NodeHeartbeat | None:
        """Return the heartbeat of this node. On the leader, check the progress of all ranks."""
        if reading.last or self._diagnosing or not self._backoff.allows(reading.now):
            return None
        try:
            heartbeat = self._check(reading)
        except Exception as error:
            self._failed(error)
            return None
        if not self._diagnosing:
            self._backoff.succeeded()
        return heartbeat

    def receive(self, member: int, content: bytes) -> None:
        """Handle the heartbeat of another node."""
        self._progress.receive(member, content)

    def _failed(self, error: Exception) -> None:
        """Pause, and give up after several errors: watching must not disturb the run."""
        logger.debug("hang detection failed", exc_info=error)
        if self._backoff.failed(time.monotonic()):
            self._agent.note(f"hang detection disabled after {_MAX_ERRORS} errors: {error!r}")

    def _check(self, reading: NodeReading) -> NodeHeartbeat | None:
        before = self._progress.generation
        heartbeat = self._progress.heartbeat(reading)
        if heartbeat is None:
            return None
        if self._progress.generation != before:
            self._stalled = self._recheck = None
        if reading.attempt.workers.formed(reading.attempt.generation):
            self._formed_again = 0
        if not self._links.leads:
            return heartbeat
        if not reading.due and self._links.members():
            return heartbeat  # other nodes report once per period
        alarm, stall_timeout = self._progress.update(heartbeat), self._agent.plan.hang.stall_timeout
        if stall_timeout is None:
            return heartbeat
        if alarm is not None and alarm.what == "resumed":
            self._resumed()
        elif alarm is not None or (self._recheck is not None and time.monotonic() > self._recheck):
            self._recheck = None
            work = self._alarm(reading.attempt, stall_timeout)
            self._alarm_task = asyncio.get_running_loop().create_task(work)
        return heartbeat

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
        generation = attempt.generation
        evidence, verdicts = await self.explain()
        if attempt is not self._progress.attempt or attempt.stopping or attempt.generation != generation:
            return
        if not verdicts:  # slow rather than stuck; if it lasts, there will be more evidence
            self._recheck = time.monotonic() + max(stall_timeout, _SOONEST)
            return
        path = await asyncio.to_thread(stall_dump.write, self._folder.path, next(self._stalls), evidence, verdicts)
        self._folder.event(events.Stalled(time=time.time(), seconds=round(evidence.waited, 1), folder=path))
        for verdict in verdicts:
            self._folder.event(
                events.VerdictEvent(time=time.time(), kind=verdict.kind, text=verdict.text, ranks=verdict.ranks)
            )
        text = await asyncio.to_thread(report.text, evidence, verdicts)
        short = "\n".join(f"  {verdict.text}" for verdict in verdicts)
        self._stalled = (time.monotonic() - evidence.waited, f"the run was stalled when it ended:\n{short}")
        self._say(f"{text}\n  stacks and all evidence: {path}" if path else text)
        if attempt.generation == generation:  # in a later group, ranks may have other numbers
            self._act(evidence, verdicts)
        if any(0 < node.silent < self._progress.quiet and not node.lost for node in evidence.nodes):
            # A busy node did not answer in time. Its evidence may change the verdict.
            self._recheck = self._recheck or time.monotonic() + max(stall_timeout, _SOONEST)

    def _say(self, text: str) -> None:
        """Print on all nodes."""
        self._agent.say(text)
        for member in self._links.members():
            self._rpc.send("verdict", 0, text.encode(), to=member)

    def _resumed(self) -> None:
        self._recheck = None
        if self._stalled is None:
            return
        seconds, self._stalled = time.monotonic() - self._stalled[0], None
        self._folder.event(events.Resumed(time=time.time(), seconds=round(seconds, 1)))
        self._say(f"the run resumed after {seconds:.0f} s")

    def _act(self, evidence: Evidence, verdicts: list[Verdict]) -> None:
        """Perform the action of --on-hang."""
        on_hang = self._agent.plan.hang.action
        parted = hang_action.cut_off(on_hang, verdicts)
        if parted is not None and self._links.dismiss(parted.ranks, parted.text):
            return
        on_trial = self._links.on_trial()
        match hang_action.newcomer(evidence, verdicts, on_trial):
            case WaitLonger(seconds):
                self._agent.note(f"the rank may only be slow: the node that joined gets another {seconds:.0f} s")
                self._recheck = time.monotonic() + seconds
                return
            case Verdict() as verdict:
                if self._links.dismiss(sorted(on_trial.intersection(verdict.ranks) or on_trial), verdict.text):
                    return
        match hang_action.choose(on_hang, evidence, verdicts, recovering=self._may_form_again()):
            case WaitLonger(seconds):
                self._agent.note(f"this may only be slow: --on-hang {on_hang} waits another {seconds:.0f} s")
                self._recheck = time.monotonic() + seconds
            case StopRun(why, fix):
                self._agent.fail(LaunchError(why, fix=fix))
            case FormAgain(rank):
                self._agent.note(f"rank {rank} is killed, so that the group forms again, with new connections")
                self._formed_again += 1
                self._kill_everywhere(frozenset({rank}))
            case KillRanks(ranks):
                if not ranks:
                    self._agent.note("no running rank is to blame, so --on-hang kill does not kill any")
                self._kill_everywhere(ranks)

    def _may_form_again(self) -> bool:
        """Return whether the group has formed after a failure and has not committed a step, and was not formed again
        too often for that reason.
        """
        attempt = self._agent.attempt
        if attempt is None or attempt.workers.formed(attempt.generation):
            return False
        return attempt.generation > 0 and self._formed_again < _FORM_AGAIN

    def _kill_everywhere(self, ranks: frozenset[int]) -> None:
        self._kill(tuple(ranks))
        for member, theirs in self._links.members().items():
            killed = tuple(rank for rank in theirs if rank in ranks)
            if killed:
                self._agent.note(f"{words.who(killed)} stalled: SIGKILL by its node")
                self._rpc.send("kill", 0, encoding.encode(killed), to=member)

    def _kill(self, ranks: tuple[int, ...]) -> None:
        attempt = self._agent.attempt
        for name, worker in attempt.living if attempt is not None else ():
            if worker.seat.rank in ranks and not worker.spare and attempt is not None:
                self._agent.note(f"rank {worker.seat.rank} {root_cause.HUNG}")
                worker.exit.hung = True
                attempt.workers.send_signal(name, signal.SIGKILL)

    # -- why

    async def explain(self) -> tuple[Evidence, list[Verdict]]:
        """Gather the evidence of all nodes now, and diagnose it."""
        evidence = await self._evidence.gather()
        if self._held:  # the ranks are expected to wait
            return evidence, []
        return evidence, await asyncio.to_thread(diagnosis.diagnose, evidence)

    async def blame(self, rank: int, timeout: Timeout) -> list[str]:
        """Return lines that name the rank that made this one time out, from the current evidence of all nodes."""
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

    async def _answer(self, _: WhyQuery) -> WhyReply | QueryRefused:
        """Answer `phalanx why`."""
        return await self._reason() or QueryRefused(why="node 0 does not answer")

    async def _answer_node(self, _: int | None, __: bytes) -> bytes | None:
        reason = await self._reason()
        return None if reason is None else encoding.encode(reason)

    async def _reason(self) -> WhyReply | None:
        """Diagnose on the leader; elsewhere, ask the leader. None: it does not answer."""
        if self._links.leads:
            evidence, verdicts = await self.explain()
            text = await asyncio.to_thread(report.text, evidence, verdicts)
            if self._held:
                text = f"too few nodes are left: the ranks wait for others to join ({self._held})\n\n{text}"
            return WhyReply(evidence=evidence, verdicts=tuple(verdicts), report=text)
        try:
            return _reasons.decode(await self._rpc.request("why", timeout=NODE_TIMEOUT + node_evidence.LONGEST))
        except (TimeoutError, msgspec.DecodeError):
            return None
