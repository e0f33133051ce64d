"""Nodes that join a healthy run, and have to show that they can take part.

A node is on trial until its workers have committed a step with the group. One that cannot take part is dismissed with
the reason, and the others continue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from phalanx.control import messages
from phalanx.control.leader.members import JoinedMember, Members
from phalanx.launcher.coordination.coordinator import AgentProxy
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults, process_failure
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_commands import NodeCommands
from phalanx.launcher.coordination.leader.readmission import Readmission
from phalanx.launcher.coordination.leader.recovery_controller import RecoveryController
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.runs import failure_report
from phalanx.launcher.workers.worker import WorkerFailure

_TRIAL_END = 3.0  # seconds in which the others end as well, if a node ends before its first step because all have ended
_EXIT_0 = "before its first step in the group: an early return or sys.exit() on this node only?"


class RemoveNode(Protocol):
    """The type of `NodeChanges.remove`."""

    def __call__(self, member: int, text: str, *, note: bool) -> None:
        """Remove a node. `note`: print the text, if nothing else reports it."""


class NodeTrials:
    """Dismisses nodes that cannot take part. `remove` is None if the run is not elastic: then none is dismissed."""

    def __init__(
        self,
        agent: AgentProxy,
        members: Members,
        group: RecoveryController,
        *,
        member_states: MemberStates,
        commands: NodeCommands,
        recoveries: Recoveries,
        results: AttemptResults,
        remove: RemoveNode | None,
    ) -> None:
        self._agent = agent
        self._members = members
        self._group = group
        self._member_states = member_states
        self._commands = commands
        self._recoveries = recoveries
        self._results = results
        self._remove = remove
        self._dismissed: dict[int, str] = {}  # members that cannot take part and have not left yet, with the reason
        self._readmission = Readmission()

    def greeting(self, member: int) -> str:
        """Return the message for a node that joins. Empty: its host was never dismissed."""
        return self._readmission.note(self._host(member), time.monotonic())

    def wait(self, member: int) -> float:
        """Return the seconds until a member may get ranks: its host may have been dismissed."""
        return self._readmission.remaining(self._host(member), time.monotonic())

    def is_dismissed(self, member: int) -> bool:
        """Return whether a member was dismissed, and has not left yet."""
        return member in self._dismissed

    def forget(self, member: int) -> bool:
        """Drop a dismissed member: it has left. Return whether it was dismissed."""
        return self._dismissed.pop(member, None) is not None

    def worker_failed(self, member: int, failure: WorkerFailure) -> bool:
        """Handle a failure on a node that has joined a healthy run. Return whether the failure is completely handled.

        A node that cannot take part is dismissed, and the others continue: their training was healthy without it.
        """
        states = self._member_states
        if self._may_dismiss and states.cannot_take_part(member, ends_run=self._group.would_stop(failure)):
            self._dismiss(member, failure.reason)
        return member not in states.ranks

    def rank_left(self, member: int) -> bool:
        """Handle a rank that has exited with code 0 in the middle of the training. Return whether that is completely
        handled: its node was on trial, and is dismissed.
        """
        states = self._member_states
        if member not in states.on_trial or not self._may_dismiss or states.training_over:
            return False
        self._dismiss(member, f"a rank of {self._members.name(member)} exited with code 0 {_EXIT_0}")
        return True

    def finished(self, member: int) -> None:
        """Handle a node whose training has ended. On trial it is dismissed, unless the others end as well."""
        if member in self._member_states.on_trial:
            joined = self._members.connected[member]
            asyncio.get_running_loop().call_later(_TRIAL_END, self._finished, joined)

    def _finished(self, joined: JoinedMember) -> None:
        """Dismiss a node on trial whose training has ended, while the others still train: it runs something else."""
        states, member = self._member_states, joined.id
        if not self._members.is_current(joined) or member not in states.on_trial or states.training_over:
            return
        if self._may_dismiss:
            report = self._results.report(member)
            self._dismiss(member, f"the training of {self._members.name(member)} ended {_EXIT_0}")
            if report is not None:
                self.dismissed_ended(member, report)

    @property
    def _may_dismiss(self) -> bool:
        return self._remove is not None and not self._commands.attempt.stopping and not self._group.preemption.begun

    def first_step(self, member: int, generation: int) -> None:
        """End the trial of a node whose workers have committed a step."""
        if generation == self._recoveries.generation:
            self._member_states.on_trial.discard(member)

    def _dismiss(self, member: int, why: str) -> None:
        """Remove a node that cannot take part. It ends once its workers have ended, see `dismissed_ended`."""
        self._member_states.leaving.add(member)
        self._commands.stop_member(member, why)
        self._dismissed[member] = why
        if member in self._member_states.ranks:  # otherwise it has cost the others nothing
            self._readmission.dismissed(self._host(member), time.monotonic(), why)
        if self._remove is not None:
            note = member in self._member_states.ranks
            self._remove(member, f"{self._members.name(member)} was dismissed", note=note)

    def _host(self, member: int) -> str:
        connected = self._members.connected.get(member)
        return connected.info.host if connected is not None else ""

    def dismiss_ranks(self, ranks: Sequence[int], why: str) -> bool:
        """Dismiss the node that has these ranks, if enough others remain. Return whether it was dismissed."""
        states = self._member_states
        member = next((member for member, table in states.ranks.items() if set(ranks) & set(table.ranks)), None)
        if member is None or member == states.own or not self._may_dismiss:
            return False
        if len(states.ranks) <= states.min_nodes:
            return False
        self._dismiss(member, why)
        return True

    def dismissed_ended(self, member: int, report: messages.AttemptEnded) -> bool:
        """Handle the last report of a dismissed node: end it, and print why. False: it is not dismissed."""
        if member not in self._dismissed:
            return False
        first, why = report.first, self._dismissed[member]
        if first is not None and first.stopped:  # it was dismissed for another reason
            first = None
        text, code = why, 1
        if first is not None:
            failure = process_failure(first, self._members.skew(member))
            text = failure_report.with_afterwards(first.block, failure_report.afterwards(failure, report.kinds))
            code = failure.exit_code
        self._agent.note(f"{self._members.name(member)} was dismissed: {text}")
        end = f"{text}\n  this node was dismissed, and the others continue without it"
        self._members.send(member, messages.EndMessage(code=code, text=end))
        return True
