"""Decides what the group does after a failure: regroup, restart, hold or stop."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace

from phalanx.contract.messages import worker_messages
from phalanx.control.leader.members import Members
from phalanx.launcher.actions import AcceptLoss, Action, EndRun, HaltWorkers, StopWorkers
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.coordinator import AgentProxy, RunResult
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_commands import NodeCommands
from phalanx.launcher.coordination.preemption import Preemption, PreemptionAction, RegroupAndHalt
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import RecoveryAction


class RecoveryController:
    """Decides for all nodes. It sends actions to the members, and returns the action of this node."""

    def __init__(
        self,
        context: NodeContext,
        agent: AgentProxy,
        members: Members,
        *,
        member_states: MemberStates,
        commands: NodeCommands,
        recoveries: Recoveries,
        results: AttemptResults,
    ) -> None:
        self.preemption = Preemption(context.plan, context.folder, perform=self._perform_preemption, note=agent.note)
        self.all_ended = asyncio.Event()  # all members have reported the end of this attempt, or are lost
        self.changed = asyncio.Event()  # a node has joined, or the run ends
        self._rendezvous = context.rendezvous
        self._agent = agent
        self._members = members
        self._member_states = member_states
        self._commands = commands
        self._recoveries = recoveries
        self._results = results
        self._hold_timer: asyncio.TimerHandle | None = None  # ends the run if too few nodes remain for too long

    @property
    def restarts(self) -> bool:
        """Return whether all ranks are started again. Not after a preemption: the next run resumes from the
        checkpoint.
        """
        return self._recoveries.latest_action is RecoveryAction.RESTART and not self.preemption.begun

    # -- failures

    def worker_failed(self, failure: WorkerFailure, sender: int | None = None) -> Action | None:
        """Decide about a failure on this node, or on the member `sender`."""
        if self._commands.attempt.stopping:
            return None
        if self.preemption.halted:  # a checkpoint is on disk; it may have been the last worker of its node
            if sender is None:
                return AcceptLoss()
            self._commands.stop_member(sender, failure.reason)
            return None
        if not self._commands.has_store:  # this node takes over, and a regroup follows
            return None
        can_regroup = self._member_states.readiness.can_regroup
        if self._recoveries.decide(failure, can_regroup=can_regroup) is not RecoveryAction.REGROUP:
            stopped = sender is not None and not self._member_states.can_regroup(sender)  # by the member itself
            return self._commands.stop(failure.reason, skip=sender if stopped else None)
        if self._hold_timer is None:
            return self._regroup(failure.reason)
        return None  # it is replaced when enough nodes have joined

    def would_stop(self, failure: WorkerFailure) -> bool:
        """Return whether this failure would end the run."""
        return self._recoveries.would_stop(failure, can_regroup=self._member_states.readiness.can_regroup)

    def nodes_lost(self, failure: WorkerFailure) -> Action | None:
        """Decide about lost nodes: the others regroup or restart without them, or hold if there are too few."""
        can_regroup = self._member_states.readiness.can_regroup
        failure = replace(failure, idle=self._agent.idle)  # a node may be silent for long before it counts as lost
        self._recoveries.nodes_changed(failure, RecoveryAction.REGROUP if can_regroup else RecoveryAction.RESTART)
        if not can_regroup:
            self._results.nodes_changed = True
            return self._commands.stop(failure.reason)
        return self._regroup(failure.reason) if self._member_states.enough else self._hold(failure.reason)

    def nodes_joined(self, names: str, action: RecoveryAction) -> Action | None:
        """Regroup or restart with nodes that have joined."""
        why = f"{names} joined"
        self._recoveries.nodes_changed(WorkerFailure(0, why, "", time.time(), 0.0, None), action, kind="node-joined")
        if action is RecoveryAction.REGROUP:
            return self._regroup(why)
        self._results.nodes_changed = True
        return self._commands.stop(why)

    def _regroup(self, why: str, *, halt: bool = False) -> Action:
        """Make all members form a new group. `halt`: which writes a checkpoint."""
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        return self._commands.regroup(self._recoveries.generation, why, halt=halt or self.preemption.begun)

    def _hold(self, why: str) -> Action:
        """Make the remaining members wait for others, for a limited time."""
        timeout = self._rendezvous.timeouts.join
        here, least, noun = len(self._member_states.ranks), self._member_states.min_nodes, self._rendezvous.noun
        left = f"{here} of at least {least} {noun}s are left"
        self._agent.note(f"{why}\n  {left}: waiting {timeout:.0f} s (--join-timeout) for another")
        if self._hold_timer is None:
            result = RunResult(1, f"{why}\n  and no other has joined within {timeout:.0f} s (--join-timeout)")
            self._hold_timer = asyncio.get_running_loop().call_later(timeout, self.give_up, result)
        return self._commands.hold(why)

    def first_step(self, generation: int, step: int, before: int) -> None:
        """Print how long the recovery took: a group that formed after a failure has committed its first step."""
        text = self._recoveries.first_step(generation, step, before)
        if text:
            self._agent.note(text, repeats=True)

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> None:
        """Print and count an update that was dropped because it was not finite."""
        self._agent.note(self._recoveries.batch_skipped(message), repeats=True)

    # -- preemption

    def preempt(self, number: signal.Signals) -> bool:
        """Begin a preemption of all nodes. False: there can be no checkpoint."""
        ranks = self._commands.plan.group.world_size
        return self._commands.attempt.running and self.preemption.begin(number, ranks)

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Pass the message of a rank to the preemption."""
        self.preemption.receive(rank, message, self._recoveries.generation)

    def _perform_preemption(self, action: PreemptionAction) -> None:
        match action:
            case HaltWorkers():
                self._agent.perform(self._commands.halt(action.step))
            case RegroupAndHalt():
                if self._member_states.readiness.can_regroup:
                    self._recoveries.next_generation()
                    self._agent.perform(self._regroup(action.why, halt=True))
            case StopWorkers():
                self._agent.perform(self._commands.stop(action.reason))
            case EndRun():
                self.end_run(action.signal)
                self._agent.perform(action)

    # -- the end

    def give_up(self, result: RunResult) -> None:
        """End the run with this result."""
        self._results.fail(result)
        self.changed.set()
        self._agent.perform(self._commands.stop(result.text.splitlines()[0]))

    def end_run(self, number: signal.Signals) -> None:
        """End the run on all members, as if by a signal of the user."""
        self._results.signal = self._results.signal or number
        self.changed.set()
        self._commands.end_run(number)

    def check_all_ended(self) -> None:
        """Set `all_ended` if no member with ranks still runs this attempt."""
        ranks = self._member_states.ranks
        if not self._results.has_all(self._members.connected.keys() & ranks.keys()):
            return
        if not self._commands.attempt.running:
            self.all_ended.set()
        elif ranks and self._member_states.own not in ranks:
            # The workers of this node are spares, and all ranks have ended.
            self._agent.perform(self._commands.stop_here("every rank has ended"))
