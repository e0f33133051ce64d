"""Orders of the leader to a follower."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.control import messages
from phalanx.launcher.actions import (
    EndRun,
    HaltWorkers,
    HoldWorkers,
    RefuseRegroup,
    RegroupPlan,
    SignalWorkers,
    StartAttempt,
    StopWorkers,
)
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.coordinator import AgentProxy, RunResult
from phalanx.launcher.plan import Plan
from phalanx.launcher.workers.regroup.readiness import Readiness


@dataclass
class FollowerState:
    """The progress of a follower in the run."""

    member: int = 0  # the number of this node
    attempt: int = 0  # the latest attempt that started here
    ordered: int = 0  # the latest attempt that the leader ordered: this node may not have started it yet
    generation: int = 0
    readiness: Readiness = field(default_factory=Readiness)  # of the workers here
    started: bool = False
    running: bool = False  # an attempt is ordered and has not ended here
    leaving: bool = False  # this node leaves an elastic run
    lost: str = ""  # why there is no leader

    def resumes(self) -> messages.AttemptState | None:
        """Return what the next leader must know about the workers here. None: there are none."""
        if not self.running:
            return None
        connected, finished, all_connected = self.readiness
        return messages.AttemptState(
            attempt=self.ordered,
            generation=self.generation,
            connected=connected,
            finished=finished,
            all_connected=all_connected,
        )


class LeaderOrders:
    """The events of the connection to the leader (`MemberEvents`): turns its messages into actions.

    `assign` returns the plan with the ranks that the leader assigned. `leader_lost` replaces a lost leader; None: its
    loss ends the run.
    """

    def __init__(
        self,
        context: NodeContext,
        agent: AgentProxy,
        state: FollowerState,
        *,
        assign: Callable[[messages.StartRanks], Plan],
        leader_lost: Callable[[str, bool], None] | None,
    ) -> None:
        self.peer_list: messages.PeerList | None = None  # the other nodes of an elastic run
        self._context = context
        self._agent = agent
        self._state = state
        self._assign = assign
        self._leader_lost = leader_lost
        self._inbox: asyncio.Queue[messages.Start | messages.EndMessage] = asyncio.Queue()

    async def next(self) -> StartAttempt | RunResult:
        """Wait for the leader to start an attempt or to end the run."""
        order, state = await self._inbox.get(), self._state
        if isinstance(order, messages.EndMessage):
            if order.preempted:
                self._context.folder.mark_preempted()
            # If all nodes share a terminal, only node 0 prints the result.
            return RunResult(order.code, order.text if self._context.rendezvous.echo or state.lost else "")
        if state.started and order.attempt > state.attempt:
            self._agent.note(f"starting all ranks again: restart {order.attempt}", repeats=True)
        if order.place.joins:
            self._agent.note("the run has begun: this node gets its ranks once its workers have started")
        elif order.place.spare:
            self._agent.note("all ranks are assigned: this node is a spare")
        state.started, state.attempt, state.readiness = True, order.attempt, Readiness()
        state.generation = max(state.generation, order.generation)
        return StartAttempt(order.attempt, self._assigned_plan(order.place), None, order.generation)

    def end(self, code: int, text: str = "") -> None:
        """End the run on this node."""
        self._inbox.put_nowait(messages.EndMessage(code=code, text=text))

    def give_up(self, why: str) -> None:
        """End the run on this node, because there is no leader."""
        self._state.lost = why
        self.end(1, f"node 0 is lost: {why}")
        self._agent.perform(self.stop_workers("node 0 is lost"))

    def stop_workers(self, reason: str) -> StopWorkers:
        """Return the action that stops the workers of this node."""
        return StopWorkers(signal.SIGTERM, reason, self._context.plan.shutdown.failure_timeout)

    def _assigned_plan(self, place: messages.StartRanks) -> Plan:
        plan = self._assign(place)
        prefixes = {seat.rank: plan.line_prefix(seat, os.uname().nodename) for seat in plan.seats}
        texts = {rank: text for rank, text in prefixes.items() if text is not None}
        self._context.console.settle(plan.group.world_size, texts)
        return plan

    # -- events of the connection

    def message_received(self, message: messages.FromLeader) -> None:
        """Handle a message of the leader."""
        state, perform = self._state, self._agent.perform
        match message:
            case messages.Waiting():
                self.waiting(message.text)
            case messages.Start():
                state.running, state.ordered = True, message.attempt
                self._agent.waiting(None)
                self._inbox.put_nowait(message)
            case messages.EndMessage():
                if state.running:
                    perform(self.stop_workers("the run has ended at node 0"))
                self._agent.waiting(None)
                self._inbox.put_nowait(message)
            case messages.Regroup():
                if state.running and message.attempt == state.ordered:
                    state.generation = message.generation
                    plan = self._assigned_plan(message.place)
                    perform(RegroupPlan(message.generation, message.why, plan, None, message.halt))
            case messages.Hold():
                if state.running and message.attempt == state.attempt:
                    perform(HoldWorkers(message.why))
            case messages.PeerList():
                self.peer_list = message
            case messages.RankLeft():
                if state.running and message.attempt == state.attempt:
                    perform(RefuseRegroup())
            case messages.HaltAll():
                if state.running:
                    perform(HaltWorkers(message.step))
            case messages.Stop():
                self._stop(message)
            case messages.ForwardSignal():
                perform(SignalWorkers(signal.Signals(message.signal)))
            case messages.RpcFrame():
                self._agent.receive_rpc(None, message)
            case messages.NoteMessage():
                self.note(message.text)

    def _stop(self, stop: messages.Stop) -> None:
        number = signal.Signals(stop.signal)
        if stop.ends:
            self._agent.perform(EndRun(number, stop.reason))
        elif self._state.running:  # otherwise the attempt has already ended here
            self._agent.perform(StopWorkers(number, stop.reason, stop.grace))

    def leader_lost(self, why: str, *, silent: bool) -> None:
        """Handle the loss of the leader: fail over in an elastic run, otherwise end."""
        if self._leader_lost is not None and self.peer_list is not None and not self._state.leaving:
            self._leader_lost(why, silent)
        else:
            self.give_up(why)

    def note(self, text: str) -> None:
        """Print a line."""
        self._agent.note(text)

    def waiting(self, text: str) -> None:
        """Show what this node is waiting for."""
        self._agent.waiting(text)
