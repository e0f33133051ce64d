"""Handles nodes that join, leave or are lost.

In an elastic run (`-n 1:4`, `--spares`) ranks are assigned again each time that a node joins or leaves. A node that
joins later starts its workers as spares; once they have imported everything, the group regroups with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from phalanx.control import messages
from phalanx.control.endpoint import STEADILY, Endpoint, answers
from phalanx.control.leader.members import JoinedMember, Members
from phalanx.launcher.actions import RegroupPlan
from phalanx.launcher.coordination.coordinator import AgentProxy, RunResult
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_commands import NodeCommands
from phalanx.launcher.coordination.leader.node_trials import NodeTrials
from phalanx.launcher.coordination.leader.recovery_controller import RecoveryController
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.workers.regroup.readiness import Readiness
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import RecoveryAction

_PLAIN_AFTER = 10.0  # seconds without a connection of a worker, after which the script counts as unable to regroup


class NodeChanges:
    """Adds nodes that join, removes those that are lost, and makes the group follow.

    `elastic`: the run continues without a lost node; otherwise it ends.
    """

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
        elastic: bool,
    ) -> None:
        self._agent = agent
        self._members = members
        self._group = group
        self._member_states = member_states
        self._commands = commands
        self._recoveries = recoveries
        self._results = results
        self._elastic = elastic
        self.trials = NodeTrials(
            agent,
            members,
            group,
            member_states=member_states,
            commands=commands,
            recoveries=recoveries,
            results=results,
            remove=self.remove if elastic else None,
        )
        self._liveness_checks: set[asyncio.Task[None]] = set()  # of members whose connection has closed

    # -- nodes that join

    def joined(self, member: int) -> None:
        """Handle a member that joined during the run."""
        self._member_states.leaving.discard(member)  # the member that had this number before
        self.trials.forget(member)
        self._group.changed.set()
        self._agent.note(f"{self._members.name(member)} has come")
        self._commands.send_peer_list()
        if text := self.trials.greeting(member):
            self._members.send(member, messages.NoteMessage(text=text))
        if self._commands.attempt.running and not self._commands.attempt.stopping:
            self.admit(member)
            self.start_spares()
            self._grow()
            self.schedule_growth()

    def admit(self, member: int) -> None:
        """Add a new member, or one of another leader. It may have workers that wait for a group."""
        state = self._members.roster.members[member].resumes
        resumes = state if state is not None and state.attempt == self._commands.attempt.number else None
        if resumes is not None:
            self._recoveries.generation = max(self._recoveries.generation, resumes.generation)
        if (
            self._member_states.admit(member, resumes) and state is not None
        ):  # its workers belong to an attempt that is over
            self._commands.stop_member(member, "the others have continued")

    def set_readiness(self, member: int, readiness: Readiness) -> None:
        """Record whether the workers of a member can regroup. A member on a host that was dismissed may have to
        wait.
        """
        wait = self.trials.wait(member)
        if wait > 0 and member not in self._member_states.ranks:
            if readiness.all_connected:
                asyncio.get_running_loop().call_later(wait, self._readmit, self._members.connected[member], readiness)
            return
        if self._member_states.set_readiness(member, readiness):
            self._grow()
        elif member in self._member_states.ranks:
            overall = self._member_states.readiness
            self._group.preemption.regroup_ready(overall.connected, overall.finished)
            self.start_spares()
            if readiness.finished:
                self.trials.finished(member)

    def _readmit(self, member: JoinedMember, readiness: Readiness) -> None:
        if self._members.is_current(member):
            self.set_readiness(member.id, readiness)

    def start_spares(self) -> None:
        """Start the workers of nodes without ranks as spares, if the script can regroup."""
        if not self._commands.attempt.stopping and not self._group.preemption.begun:
            self._commands.start_spares(self._recoveries.generation)

    def _grow(self) -> None:
        """Regroup with the nodes that are ready, if there is room."""
        if self._commands.attempt.stopping or self._group.preemption.begun or not self._commands.has_store:
            return
        joined = self._member_states.next_ready()
        if joined and self._member_states.readiness.can_regroup:
            self._agent.perform(self._group.nodes_joined(self._names(joined), RecoveryAction.REGROUP))

    def schedule_growth(self) -> None:
        """Schedule a restart with the new nodes, for a script that cannot regroup."""
        if self._member_states.next_idle(self._members.connected):
            attempt = self._commands.attempt
            wait = max(0.0, attempt.began + _PLAIN_AFTER - time.monotonic())
            asyncio.get_running_loop().call_later(wait, self._grow_by_restart, attempt.number)

    def _grow_by_restart(self, number: int) -> None:
        """Restart with the new nodes, if the script still has not shown that it can regroup."""
        attempt, readiness = self._commands.attempt, self._member_states.readiness
        joined = self._member_states.next_idle(self._members.connected)
        if attempt.number != number or attempt.stopping or not joined or readiness.connected or readiness.finished:
            return
        self._agent.perform(self._group.nodes_joined(self._names(joined), RecoveryAction.RESTART))

    def _names(self, members: Sequence[int]) -> str:
        return ", ".join(self._members.name(member) for member in members)

    # -- nodes that leave

    def left(self, member: int, code: int, text: str) -> None:
        """Handle a member that has disconnected with a reason."""
        if self.trials.forget(member):
            self._member_states.leaving.discard(member)
            return
        text = f"{self._members.name(member)}: {text or 'it has left the run'}"
        if self._elastic:
            self.remove(member, text)
        elif self._members.roster.complete and not self._members.end_sent:
            # Before the start it may join again. Afterwards its ranks are missing.
            self._group.give_up(RunResult(code or 1, text))
        self._member_states.leaving.discard(member)
        self._group.check_all_ended()

    def leaves(self, member: int, text: str) -> None:
        """Handle a member of an elastic run that is about to leave: the others continue without it."""
        self._member_states.leaving.add(member)
        self.remove(member, text)

    def lost(self, member: int, why: str, *, silent: bool) -> None:
        """Handle the loss of a member: end the run or, if it is elastic, continue without it."""
        if self.trials.is_dismissed(member):
            self.left(member, 1, why)
            return
        text = f"{self._members.name(member)} is lost: {why}"
        self._member_states.leaving.discard(member)
        if not self._elastic:
            self._group.give_up(RunResult(1, text))
            self._group.check_all_ended()
        elif silent:
            self._continue_without(member, text, silent=True)
        else:
            check = asyncio.get_running_loop().create_task(self._check_liveness(member, text))
            self._liveness_checks.add(check)
            check.add_done_callback(self._liveness_checks.discard)

    async def _check_liveness(self, member: int, text: str) -> None:
        """Handle a closed connection. A member that still answers is alive, and has dropped this node."""
        address, port = self._members.failover_endpoints.get(member, ("", 0))
        lives = bool(port) and await answers(Endpoint(address, port), steadily=STEADILY)
        self._continue_without(member, text, silent=lives)

    async def wait_for_liveness_checks(self) -> None:
        """Wait until it is known which of the disconnected members are alive."""
        while self._liveness_checks:
            await asyncio.wait(self._liveness_checks)

    def _continue_without(self, member: int, text: str, *, silent: bool) -> None:
        if silent and 2 * self._members.responsive < len(self._members.roster.members):
            # The others may continue without this node: prevent split-brain.
            cut_off = "this node is cut off from most of the others, which may continue without it"
            self._group.give_up(RunResult(1, f"{text}\n  {cut_off}"))
        else:
            self.remove(member, text)
        self._group.check_all_ended()

    def remove(self, member: int, text: str, *, note: bool = True) -> None:
        """Remove a node. The others regroup or restart without it, or hold if they are too few.

        `note`: print `text`, if nothing else reports it.
        """
        self._members.roster.remove(member)
        self._results.remove(member)
        ranks = self._member_states.remove(member)
        if self._members.end_sent:
            return
        attempt, readiness = self._commands.attempt, self._member_states.readiness
        ends = attempt.stopping or self._results.signal is not None or self._group.preemption.halted
        # Once some ranks have finished, the others end by themselves.
        if ranks is None or not attempt.running or ends or readiness.finished:
            self._commands.send_peer_list()
            if note:
                self._agent.note(text)
            return
        uptime = time.monotonic() - attempt.began
        action = self._group.nodes_lost(WorkerFailure(ranks.ranks[0], text, "", time.time(), uptime, None))
        if not isinstance(action, RegroupPlan):  # a regroup also sends it
            self._commands.send_peer_list()
        if not readiness.connected:
            self._agent.note(text)
        self._agent.perform(action)
