"""The coordinator of every node but node 0: it joins the leader, executes its orders, and reports to it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

from phalanx.contract.messages import worker_messages
from phalanx.control import messages
from phalanx.errors import LaunchError
from phalanx.launcher.actions import Action, StartAttempt
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.coordinator import AgentProxy, AgentView, AttemptReport, RunResult
from phalanx.launcher.coordination.follower.leader_link import LeaderLink
from phalanx.launcher.coordination.follower.orders import FollowerState, LeaderOrders
from phalanx.launcher.coordination.rank_assignment import assigned_plan
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.workers.regroup.readiness import Readiness
from phalanx.launcher.workers.worker import WorkerFailure

_LONGEST = 1 << 14  # characters of a text for the leader
_MOST_EXITS = 1 << 12  # maximum number of ranks without an error that are reported to the leader
_DRAIN = 10.0  # seconds to forward the rest of the output


class FollowerCoordinator:
    """Joins the leader, executes its orders, and reports to it.

    `leader_lost` is called with the reason, and whether the leader may still be alive. Without it, the loss of the
    leader ends the run.
    """

    def __init__(self, context: NodeContext, *, leader_lost: Callable[[str, bool], None] | None = None) -> None:
        self.state = FollowerState()
        self._first_step = (-1, -1)  # attempt and generation of the latest report
        self._context = context
        self._agent = AgentProxy()
        self.orders = LeaderOrders(context, self._agent, self.state, assign=self._assign, leader_lost=leader_lost)
        self.links = LeaderLink(context, self.orders)
        self.log_forwarder: LogForwarder | None = LogForwarder(self._send, lambda: self.links.member.queued)

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent.attach(agent)

    # -- the leader

    async def join(self) -> None:
        """Join the leader, and name the run folder accordingly. Raises JoinError."""
        folder, rendezvous = self._context.folder, self._context.rendezvous
        welcome = await self.links.member.join(rendezvous.timeouts.join)
        try:
            folder.join(welcome.run, welcome.member)
        except OSError as error:
            raise LaunchError(
                f"the run folder cannot be made: {error}", fix="free the disk, or --log-dir DIR"
            ) from error
        for text in welcome.notes:
            self._agent.note(text)
        for text in self._context.plan.remarks.warnings:
            self._send(messages.NoteMessage(text=text))
        self.state.member = welcome.member
        at = f"{welcome.leader} at {self.links.member.connection.leader_address}"
        self._agent.note(f"joined {at} as {rendezvous.noun} {welcome.member}, output in {folder.path}")

    def _send(self, message: messages.Message) -> None:
        """Send a message to the current leader."""
        self.links.send(message)

    def _assign(self, place: messages.StartRanks) -> Plan:
        leader = self.links.member.connection
        return assigned_plan(
            self._context.plan, place, leader_address=leader.leader_address, own_address=leader.own_address
        )

    # -- attempts

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Wait for the leader to start the first attempt or to end the run."""
        return await self.orders.next()

    async def wait_for_others(self) -> None:
        """Return at once: a follower hosts nothing."""

    def is_last_attempt(self, *, failed: bool) -> bool:  # noqa: ARG002
        """Return whether the leader is lost: only the leader knows it otherwise."""
        return bool(self.state.lost)

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Report to the leader, and wait for its next order."""
        self.state.running = False
        if self.log_forwarder is not None and not self.state.lost:
            await self.log_forwarder.drained(_DRAIN)
        self._send(
            messages.AttemptEnded(
                attempt=report.attempt,
                failed=len(report.deaths),
                kinds=report.kinds,
                first=_first(report),
                exited=tuple(
                    messages.CleanExitReport(rank=one.rank, time=one.time, in_training=one.in_training)
                    for one in report.exited[:_MOST_EXITS]
                ),
                trouble=report.trouble[:_LONGEST],
                left=report.left[:_LONGEST],
            )
        )
        return await self.orders.next()

    # -- workers of this node

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Report the failure to the leader. Stop the workers at once if they cannot regroup."""
        self._send(
            messages.NodeWorkerFailed(
                rank=failure.rank,
                reason=failure.reason,
                time=failure.time,
                place=failure.place[:1000],
                retry_chance=failure.retry_chance,
                idle=failure.idle,
                uptime=failure.uptime,
                step=failure.step,
                generation=failure.generation,
            )
        )
        # If they can regroup, the leader decides.
        return None if self.state.readiness.can_regroup else self.orders.stop_workers(failure.reason)

    def regroup_ready(self, connected: bool, finished: bool, all_connected: bool) -> None:
        """Report the readiness to the leader."""
        self.state.readiness = Readiness(connected, finished, all_connected)
        self._send(messages.RegroupReady(connected=connected, finished=finished, all_connected=all_connected))

    def rank_left(self) -> None:
        """Report it to the leader."""
        self._send(messages.RankLeft(attempt=self.state.attempt))

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Report the first step of a generation to the leader: once, though every rank of this node reports it."""
        first = (self.state.attempt, message.generation)
        if first == self._first_step:
            return
        self._first_step = first
        self._send(messages.FirstStepCommitted(generation=message.generation, step=message.step, before=message.before))

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> None:
        """Report it to the leader."""
        self._send(messages.NodeBatchSkipped(step=message.step, what=message.what, seconds=message.seconds))

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Send the report of a rank about a halt to the leader."""
        match message:
            case worker_messages.HaltAck():
                self._send(
                    messages.NodeHaltAck(
                        rank=rank, step=message.step, generation=message.generation, stuck=message.stuck
                    )
                )
            case worker_messages.HaltedAt():
                self._send(messages.NodeHalted(step=message.step))

    # -- signals

    def preempt(self, number: signal.Signals) -> bool:
        """Request a preemption from the leader. False if it cannot help."""
        state = self.state
        # In an elastic run this node leaves, and the others continue.
        elastic = self._context.rendezvous.elastic
        taken = state.running and state.readiness.connected and not state.lost and not elastic
        if taken:  # node 0 ends the run, with or without a checkpoint
            self._send(messages.SignalReceived(signal=number, preempt=True))
        return taken

    def signal_received(self, number: signal.Signals) -> None:
        """Report the signal to the leader, and end here if the leader does not decide."""
        state = self.state
        begun = state.running or state.started  # before the start a node that left may join again: the others wait
        if begun:
            self._send(messages.SignalReceived(signal=number))
        state.leaving = self._context.rendezvous.elastic and number == signal.SIGTERM
        if not begun or state.leaving:
            self.orders.end(128 + number)

    def forward_signal(self, number: signal.Signals) -> None:
        """Do nothing: the leader forwards signals."""

    # -- the end

    def announce_result(self, code: int, text: str) -> None:
        """Do nothing: the leader announces the result."""

    async def close(self, code: int, text: str) -> None:
        """Leave the run."""
        if self.log_forwarder is not None:
            self.log_forwarder.close()
        with contextlib.suppress(ConnectionError):
            await self.links.member.leave(min(code, 255), text[:_LONGEST])


def _first(report: AttemptReport) -> messages.FailureReport | None:
    """Return the first failure of this node. The leader compares those of all nodes."""
    death = root_cause.first_cause(report.deaths)
    if death is None:
        return None
    return messages.FailureReport(
        rank=death.rank,
        code=death.code,
        time=death.time,
        stopped=death.stopped,
        device=death.device,
        error=death.error if len(death.error) < 1 << 16 else "",
        stderr=tuple(line[:1000] for line in death.stderr[-30:]),
        memory=death.memory,
        block=report.block[: 1 << 15],
        blame=tuple(line[:1000] for line in death.blame[:16]),
    )
