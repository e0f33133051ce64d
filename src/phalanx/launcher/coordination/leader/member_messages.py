"""Handles events of the control plane on the leader: messages of members, and members that join or are lost."""

from __future__ import annotations

import signal
import time

from phalanx.contract import events
from phalanx.contract.messages import worker_messages
from phalanx.control import messages
from phalanx.control.leader.members import Members
from phalanx.launcher.actions import EndRun
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.coordinator import AgentProxy, RunResult
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_changes import NodeChanges
from phalanx.launcher.coordination.leader.node_commands import NodeCommands
from phalanx.launcher.coordination.leader.recovery_controller import RecoveryController
from phalanx.launcher.coordination.leader.remote_output import RemoteOutput
from phalanx.launcher.workers.regroup.readiness import Readiness
from phalanx.launcher.workers.worker import WorkerFailure

_PROGRESS_INTERVAL = 0.5  # seconds between two events about the progress of the rendezvous


class MemberMessages:
    """The events of the control plane (`LeaderEvents`)."""

    def __init__(
        self,
        context: NodeContext,
        agent: AgentProxy,
        members: Members,
        *,
        member_states: MemberStates,
        commands: NodeCommands,
        results: AttemptResults,
        group: RecoveryController,
        changes: NodeChanges,
        output: RemoteOutput,
    ) -> None:
        self._context = context
        self._agent = agent
        self._members = members
        self._member_states = member_states
        self._commands = commands
        self._results = results
        self._group = group
        self._changes = changes
        self._output = output
        self._last_joined: tuple[str, ...] = ()  # members that had joined at the last event
        self._last_progress = -_PROGRESS_INTERVAL  # when that was written

    def message_received(self, member: int, message: messages.FromMember) -> None:
        """Handle a message of a member."""
        match message:
            case messages.Log():
                self._show(member, message)
            case messages.NodeWorkerFailed():
                self._worker_failed(member, message)
            case messages.RegroupReady():
                readiness = Readiness(message.connected, message.finished, message.all_connected)
                self._changes.set_readiness(member, readiness)
            case messages.RankLeft():
                if message.attempt == self._commands.attempt.number and not self._changes.trials.rank_left(member):
                    self._agent.perform(self._commands.refuse_regroup())
            case messages.NodeHaltAck():
                ack = worker_messages.HaltAck(message.step, message.generation, message.stuck)
                self._group.halt_message(message.rank, ack)
            case messages.NodeHalted():
                self._group.halt_message(0, worker_messages.HaltedAt(message.step))
            case messages.FirstStepCommitted():
                self._changes.trials.first_step(member, message.generation)
                self._group.first_step(message.generation, message.step, message.before)
            case messages.NodeBatchSkipped():
                skipped = worker_messages.SkippedBatch(message.step, message.what, message.seconds)
                self._group.batch_skipped(skipped)
            case messages.SignalReceived():
                self._signal_received(member, message)
            case messages.AttemptEnded():
                # A dismissed node ends, even if the others have begun another attempt meanwhile.
                dismissed = self._changes.trials.dismissed_ended(member, message)
                if not dismissed and message.attempt == self._commands.attempt.number:
                    self._attempt_ended(member, message)
            case messages.NoteMessage():
                self._agent.note(f"{self._members.name(member)}: {message.text}")
            case messages.RpcFrame():
                self._agent.receive_rpc(member, message)
            case messages.Leaving():
                self._changes.left(member, message.code, message.text)

    def _show(self, member: int, log: messages.Log) -> None:
        ranks = self._member_states.ranks
        if member in ranks and log.rank in ranks[member].ranks:
            self._output.show(member, log, filter_noise=self._member_states.readiness.connected)

    def _worker_failed(self, member: int, message: messages.NodeWorkerFailed) -> None:
        failure = WorkerFailure(
            message.rank,
            f"{message.reason} on {self._members.name(member)}",
            message.place,
            message.time - self._members.skew(member),
            message.uptime,
            message.step,
            generation=message.generation,
            retry_chance=message.retry_chance,
            idle=message.idle,
        )
        if not self._changes.trials.worker_failed(member, failure):
            self._agent.perform(self._group.worker_failed(failure, sender=member))

    def _signal_received(self, member: int, message: messages.SignalReceived) -> None:
        """Preempt the run, remove the node, or end the run, because a member received a signal."""
        number, name = signal.Signals(message.signal), self._members.name(member)
        if message.preempt and self._preempt(name, number):
            return
        if self._context.rendezvous.elastic and number == signal.SIGTERM:  # it leaves, and the others continue
            self._changes.leaves(member, f"{name} leaves ({number.name})")
            return
        first = self._results.signal is None
        if first:
            self._agent.note(f"{name} received {number.name}")
        if first or number == signal.SIGKILL:
            self._group.end_run(number)
        self._agent.perform(EndRun(number, f"{number.name} received by {name}"))

    def _preempt(self, name: str, number: signal.Signals) -> bool:
        """Begin a preemption for a member that received a signal. Return whether the signal is completely handled."""
        if self._results.signal is None and not self._group.preemption.begun:
            self._agent.note(f"{name} received {number.name}")
        preempted = self._results.signal is None and self._group.preempt(number)
        return preempted or number not in self._context.plan.shutdown.signals

    def _attempt_ended(self, member: int, report: messages.AttemptEnded) -> None:
        self._results.add(member, report)
        if member not in self._member_states.ranks:
            self._member_states.spare_ended(member)
        elif report.trouble and not self._group.restarts:
            self._group.give_up(RunResult(128 + signal.SIGKILL, f"{self._members.name(member)}: {report.trouble}"))
        self._group.check_all_ended()

    def member_joined(self, member: int) -> None:
        """Handle a member that joined during the run."""
        self._changes.joined(member)

    def member_lost(self, member: int, why: str, *, silent: bool) -> None:
        """Handle the loss of a member."""
        self._changes.lost(member, why, silent=silent)

    def note(self, text: str) -> None:
        """Print a line."""
        self._agent.note(text)

    def waiting(self, text: str) -> None:
        """Show what this node is waiting for."""
        self._agent.waiting(text)

    def rendezvous_progress(self, joined: tuple[str, ...], missing: tuple[str, ...], expected: int, text: str) -> None:
        """Write to the run folder which nodes have joined and which are missing."""
        now = time.monotonic()
        if joined != self._last_joined and (not text or now - self._last_progress >= _PROGRESS_INTERVAL):
            self._last_joined, self._last_progress = joined, now
            text = text.partition(" (")[0]  # without the waiting time, which changes
            self._context.folder.event(
                events.RendezvousProgress(
                    time=time.time(), expected=expected, joined=joined, missing=missing, text=text
                )
            )
