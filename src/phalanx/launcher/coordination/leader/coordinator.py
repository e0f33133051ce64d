"""The coordinator of node 0: waits for the nodes, decides for all of them, and ends the run for all.

member_states.py        which members have ranks or are spares, and whether their workers can regroup
node_commands.py        carries a decision out on all nodes
recovery_controller.py  what follows a failure: regroup, restart, hold or stop
node_changes.py         what follows when nodes join, leave or are lost
node_trials.py          nodes that join a healthy run, and are dismissed if they cannot take part
attempt_results.py      how an attempt ended on all nodes, and what follows
member_messages.py      messages of members
remote_output.py        output of ranks on other nodes
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.contract.messages import worker_messages
from phalanx.control import messages
from phalanx.control.endpoint import Endpoint, probe
from phalanx.control.leader.leader import Leader
from phalanx.control.leader.liveness import Timing
from phalanx.control.leader.members import MemberNames, Members
from phalanx.control.leader.roster import Roster
from phalanx.launcher.actions import Action, StartAttempt
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.coordinator import AgentProxy, AgentView, AttemptReport, RunResult
from phalanx.launcher.coordination.leader.attempt_results import AttemptResults
from phalanx.launcher.coordination.leader.member_links import MemberLinks
from phalanx.launcher.coordination.leader.member_messages import MemberMessages
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_changes import NodeChanges
from phalanx.launcher.coordination.leader.node_commands import CurrentAttempt, NodeCommands
from phalanx.launcher.coordination.leader.recovery_controller import RecoveryController
from phalanx.launcher.coordination.leader.remote_output import RemoteOutput
from phalanx.launcher.coordination.quorum import Electorate
from phalanx.launcher.coordination.rank_assignment import node_info
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.workers.regroup.readiness import Readiness
from phalanx.launcher.workers.worker import WorkerFailure

_LONGEST_TEXT = 1 << 15  # characters of the result
_MANY = 256  # members
# A full collection visits about 200 objects per member: with the usual (700, 10, 10) it took a third of the CPU time
# of a leader of 4,096, and stopped it for a second each time. Almost all garbage is freed without a collection.
_COLLECT_RARELY = (10_000, 10, 10)


@dataclass(frozen=True)
class TakeoverState:
    """What is known about a run whose leader is lost."""

    leader: int  # number of the lost leader
    why: str
    attempt: int
    generation: int
    readiness: Readiness  # of the workers of this node
    worked: frozenset[int]  # members that had ranks
    others: Mapping[int, Endpoint | None]  # members that should join the new leader; None: the address is unknown
    electorate: Electorate  # the members with which this node may lead


class LeaderCoordinator:
    """Waits for the members, and decides for all nodes."""

    log_forwarder: LogForwarder | None = None

    def __init__(self, context: NodeContext) -> None:
        rendezvous = context.rendezvous
        self._context = context
        self._agent = agent = AgentProxy()
        self._members = members = Members(
            Roster(rendezvous.expected, rendezvous.promised, rendezvous.least, rendezvous.spares),
            MemberNames(rendezvous.noun, rendezvous.names, rendezvous.managed),
        )
        self._member_states = member_states = MemberStates(members.roster, rendezvous.member or 0)
        output = RemoteOutput(context.console, members)
        self._commands = commands = NodeCommands(context, members, member_states, output)
        self._recoveries = recoveries = Recoveries(context.plan.recovery.policy, context.folder)
        self._results = results = AttemptResults(agent, members, context.folder, recoveries)
        self._group = group = RecoveryController(
            context,
            agent,
            members,
            member_states=member_states,
            commands=commands,
            recoveries=recoveries,
            results=results,
        )
        self._changes = NodeChanges(
            agent,
            members,
            group,
            member_states=member_states,
            commands=commands,
            recoveries=recoveries,
            results=results,
            elastic=rendezvous.elastic,
        )
        self.links = MemberLinks(members, member_states, self._changes)
        self._events = MemberMessages(
            context,
            agent,
            members,
            member_states=member_states,
            commands=commands,
            results=results,
            group=group,
            changes=self._changes,
            output=output,
        )
        self._leader: Leader | None = None  # from `join` or `take_over` on

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent.attach(agent)

    # -- rendezvous

    async def join(self) -> None:
        """Open the control port and wait for the members. Raises JoinError."""
        rendezvous, sockets = self._context.rendezvous, self._context.sockets
        leader = await self._open_control_port()
        if rendezvous.location.file is not None:
            from phalanx.control.leader_file import LeaderFilePath

            addresses = tuple(str(sock.getsockname()[0]) for sock in sockets)
            rendezvous.location.file.announce(LeaderFilePath(addresses, self._context.port))
        await leader.wait_for_members(rendezvous.timeouts.join)

    async def _open_control_port(self) -> Leader:
        rendezvous = self._context.rendezvous
        if rendezvous.expected > _MANY:
            gc.set_threshold(*_COLLECT_RARELY)
        last_call = rendezvous.timeouts.last_call if rendezvous.elastic else 0.0
        leader = self._leader = Leader(
            rendezvous.token,
            node_info(self._context.plan, rendezvous),
            self._members,
            run=self._context.folder.name,
            events=self._events,
            timing=Timing(node_timeout=rendezvous.timeouts.node, last_call=last_call),
        )
        await leader.open(self._context.sockets)
        return leader

    async def take_over(self, state: TakeoverState, timeout: float) -> None:
        """Lead instead of a lost leader: wait for the others, then regroup, restart or hold."""
        own, member_states = self._member_states.own, self._member_states
        self._commands.attempt = CurrentAttempt(state.attempt, time.monotonic(), running=True)
        self._recoveries.generation = state.generation
        member_states.expect(state.others.keys() | {own}, state.worked, state.readiness)
        leader = await self._open_control_port()
        await leader.wait_for_survivors(state.others.keys(), timeout)
        here = {own} | (self._members.connected.keys() & state.others.keys())
        member_states.keep(here)
        for member in list(self._members.connected):
            self._changes.admit(member)
        absent = {member: address for member, address in state.others.items() if member not in here}
        ended = {member for member, address in absent.items() if address and await probe(address) == "closed"}
        electorate = replace(state.electorate, ended=state.electorate.ended | ended)
        if not electorate.elects(here):
            self.fail(f"node {state.leader} is lost: {state.why}; {electorate.missing(here)}")
            return
        self._commands.open_store()
        where = ", ".join(str(Endpoint(*sock.getsockname()[:2])) for sock in self._context.sockets)
        self._agent.note(f"this node leads now; others join at {where}")
        readiness = member_states.readiness
        self._group.preemption.regroup_ready(readiness.connected, readiness.finished)  # the lost leader knew it
        failure = WorkerFailure(0, f"node {state.leader} is lost: {state.why}", "", time.time(), 0.0, None)
        self._agent.perform(self._group.nodes_lost(failure))
        self._changes.start_spares()

    def fail(self, text: str) -> None:
        """End the run, because this node cannot lead."""
        self._group.give_up(RunResult(1, text))

    # -- attempts

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Start the first attempt, once enough nodes have joined."""
        return await self._next_attempt(0)  # nodes may have left since they joined

    async def _next_attempt(self, attempt: int) -> StartAttempt | RunResult:
        """Start an attempt with the connected nodes, once there are enough."""
        roster, timeout = self._members.roster, self._context.rendezvous.timeouts.join
        until = time.monotonic() + timeout
        while not roster.enough or self._results.failure is not None:
            result = self._results.ended()
            if result is not None:
                return result
            least, noun = self._member_states.min_nodes, self._context.rendezvous.noun
            here = f"{len(roster.members)} of at least {least} {noun}s are here"
            if time.monotonic() >= until:
                return RunResult(1, f"{here}, and no other has joined within {timeout:.0f} s (--join-timeout)")
            self._agent.waiting(f"{here}, waiting for others ({until - time.monotonic():.0f} s)")
            self._group.changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._group.changed.wait(), 1.0)
        self._agent.waiting(None)
        self._results.start_attempt()
        self._group.all_ended.clear()
        start = self._commands.start(attempt, self._recoveries.generation)
        self._changes.schedule_growth()
        return start

    async def wait_for_others(self) -> None:
        """Wait until all members have reported the end of this attempt, or are lost."""
        self._commands.attempt.running = False
        self._group.check_all_ended()
        await self._group.all_ended.wait()
        await self._changes.wait_for_liveness_checks()

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return whether no restart follows."""
        return self._results.is_last(failed=failed, restarts=self._group.restarts)

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Compare the failures of all nodes, and return a restart or the result of the run."""
        preemption = self._group.preemption
        preemption.close()
        absent = self._member_states.ranks.keys() - self._members.connected.keys() - {self._member_states.own}
        preempted = preemption.final_text(self._recoveries.summary()) if preemption.halted else None
        next_ = self._results.evaluate(report, restarts=self._group.restarts, preempted=preempted, absent=absent)
        if isinstance(next_, RunResult):
            return next_
        self._agent.note(next_.text, repeats=True)
        return await self._next_attempt(report.attempt + 1)

    # -- workers of this node

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Decide for all nodes about a failure on this node."""
        if self._member_states.own not in self._member_states.ranks:  # its spare workers: the ranks do not need them
            self._agent.note(failure.reason)
            return None
        return self._group.worker_failed(failure)

    def regroup_ready(self, connected: bool, finished: bool, all_connected: bool) -> None:
        """Record the readiness of this node, as for any member."""
        self._changes.set_readiness(self._member_states.own, Readiness(connected, finished, all_connected))

    def rank_left(self) -> None:
        """Tell all nodes that the rank has left."""
        self._agent.perform(self._commands.refuse_regroup())

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Print how long the recovery took."""
        self._group.first_step(message.generation, message.step, message.before)

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> None:
        """Print it and count it."""
        self._group.batch_skipped(message)

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Pass the message to the preemption."""
        self._group.halt_message(rank, message)

    # -- signals

    def preempt(self, number: signal.Signals) -> bool:
        """Begin a preemption of all nodes."""
        return self._group.preempt(number)

    def signal_received(self, number: signal.Signals) -> None:
        """Stop the run on all members."""
        self._group.end_run(number)

    def forward_signal(self, number: signal.Signals) -> None:
        """Forward a signal to all members. A scheduler signals all of its tasks itself."""
        if self._context.rendezvous.task is None:
            self._members.broadcast(messages.ForwardSignal(signal=number))

    # -- the end

    def announce_result(self, code: int, text: str) -> None:
        """Send the result to all members."""
        preempted = self._context.folder.is_preempted(code)
        self._members.broadcast(messages.EndMessage(code=code, text=text[:_LONGEST_TEXT], preempted=preempted))

    async def close(self, code: int, text: str) -> None:
        """Send the result to all members, and close all connections and sockets."""
        self.announce_result(code, text)
        if self._leader is not None:
            await self._leader.close()
        if self._context.rendezvous.location.file is not None:
            self._context.rendezvous.location.file.close()
        self._commands.close()
        for sock in self._context.sockets:
            sock.close()
