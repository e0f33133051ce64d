"""Executes a decision on all nodes: sends it to the members, and returns the action for this node."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.control import messages
from phalanx.control.leader.members import Members
from phalanx.errors import LaunchError
from phalanx.launcher.actions import HaltWorkers, HoldWorkers, RefuseRegroup, RegroupPlan, StartAttempt, StopWorkers
from phalanx.launcher.coordination import port
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.remote_output import RemoteOutput
from phalanx.launcher.coordination.rank_assignment import assigned_plan

_LONGEST_REASON = 4096  # characters


@dataclass
class CurrentAttempt:
    """The current attempt, or the last one."""

    number: int = 0
    began: float = 0.0  # monotonic time
    running: bool = False  # on this node
    stopping: bool = False  # all workers have been asked to stop


class NodeCommands:
    """Starts, regroups, holds and stops the workers of all nodes."""

    def __init__(
        self, context: NodeContext, members: Members, member_states: MemberStates, output: RemoteOutput
    ) -> None:
        self.plan = context.plan  # with the ranks of this node
        self.attempt = CurrentAttempt()
        self._context = context
        self._members = members
        self._member_states = member_states
        self._output = output
        self._store: socket.socket | None = None

    @property
    def _grace(self) -> float:
        return self.plan.shutdown.failure_timeout

    # -- the store

    @property
    def has_store(self) -> bool:
        """Return whether the store's socket is open. It is not while this node takes over from a lost leader."""
        return self._store is not None

    def open_store(self) -> None:
        """Open the store's socket on the address that all members have used. Does nothing if it is open."""
        if self._store is not None:
            return
        reached = Counter(member.leader_address for member in self._members.connected.values())
        if not reached:  # no other node has joined yet, and one may use any address
            reached.update(str(sock.getsockname()[0]) for sock in self._context.sockets)
        address = reached.most_common(1)[0][0]
        if len(reached) == 1:
            self._store = port.listen(address, 0)
        else:
            # Members use several addresses. The store has one socket, so it listens on all of them.
            self._store = port.listen("::" if any(":" in each for each in reached) else "0.0.0.0", 0)  # noqa: S104
        self.plan = replace(self.plan, group=replace(self.plan.group, master_addr=address))

    def close(self) -> None:
        """Close the store's socket."""
        if self._store is not None:
            self._store.close()

    # -- workers

    def start(self, attempt: int, generation: int) -> StartAttempt:
        """Start an attempt on all members that get ranks. `generation`: of the group that they form."""
        self.open_store()
        self.attempt = CurrentAttempt(attempt, time.monotonic(), running=True)
        self._member_states.start_attempt(self._members.connected)
        self._assign_ranks()
        self._send_start(self._member_states.ranks, generation)
        self.send_peer_list()
        return StartAttempt(attempt, self.plan, self._store, generation)

    def start_spares(self, generation: int) -> None:
        """Start the workers of idle members as spares."""
        self._send_start(self._member_states.start_spares(self._members.connected), generation)

    def _send_start(self, members: Iterable[int], generation: int) -> None:
        for member in members:
            start = messages.Start(attempt=self.attempt.number, place=self._start_ranks(member), generation=generation)
            self._members.send(member, start)

    def regroup(self, generation: int, why: str, *, halt: bool) -> RegroupPlan:
        """Form a new group of the members that have ranks or are ready."""
        self._member_states.regroup()
        self._assign_ranks()
        for member in self._member_states.ranks:
            regroup = messages.Regroup(
                attempt=self.attempt.number,
                generation=generation,
                why=why[:_LONGEST_REASON],
                place=self._start_ranks(member),
                halt=halt,
            )
            self._members.send(member, regroup)
        asyncio.get_running_loop().call_soon(self.send_peer_list)  # once all assignments are written
        return RegroupPlan(generation, why, self.plan, self._store, halt)

    def hold(self, why: str) -> HoldWorkers:
        """Make all workers keep their state in memory and wait."""
        self._members.broadcast(messages.Hold(attempt=self.attempt.number, why=why))
        return HoldWorkers(why)

    def refuse_regroup(self) -> RefuseRegroup:
        """Tell workers of all nodes that have lost a rank not to wait for an assignment."""
        self._members.broadcast(messages.RankLeft(attempt=self.attempt.number))
        return RefuseRegroup()

    def halt(self, step: int | None) -> HaltWorkers:
        """Make all workers report their step, or halt at `step`."""
        self._members.broadcast(messages.HaltAll(step=step))
        return HaltWorkers(step)

    def stop(self, reason: str, *, skip: int | None = None) -> StopWorkers | None:
        """Stop the workers of all members but `skip`. Return the same for this node, if an attempt runs on it."""
        self.attempt.stopping = True
        for member in list(self._members.connected):
            if member != skip:
                self.stop_member(member, reason)
        return self.stop_here(reason)

    def stop_member(self, member: int, reason: str) -> None:
        """Stop the workers of one member."""
        self._members.send(member, messages.Stop(signal=signal.SIGTERM, reason=reason, grace=self._grace))

    def stop_here(self, reason: str) -> StopWorkers | None:
        """Return the action that stops the workers of this node, if an attempt runs on it."""
        return StopWorkers(signal.SIGTERM, reason, self._grace) if self.attempt.running else None

    def end_run(self, number: signal.Signals) -> None:
        """End the run on all members, as if by a signal of the user."""
        grace = 0.0 if number == signal.SIGKILL else self.plan.shutdown.stop_timeout
        reason = f"{number.name} received at node 0"
        self._members.broadcast(messages.Stop(signal=number, reason=reason, grace=grace, ends=True))

    def send_peer_list(self) -> None:
        """Send the list of all members to all members, so that one of them can lead if this node is lost."""
        if self._context.rendezvous.elastic:
            member_states = self._member_states
            self._members.broadcast(self._members.peer_list(member_states.own, member_states.ranks.keys()))

    # -- ranks

    def _start_ranks(self, member: int) -> messages.StartRanks:
        if self._store is None:
            raise LaunchError("there is no store")
        return self._member_states.start_ranks(member, int(self._store.getsockname()[1]))

    def _assign_ranks(self) -> None:
        """Set the ranks of this node in its plan, and the prefixes of all ranks on the console."""
        self._output.ranks_assigned(self.plan, self._member_states.ranks)
        own, address = self._start_ranks(self._member_states.own), self.plan.group.master_addr
        self.plan = assigned_plan(self.plan, own, leader_address=address, own_address=address)
