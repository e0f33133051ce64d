"""The coordinator of every node but node 0: it joins the leader, obeys it, and reports to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from phalanx.contract import worker_messages
from phalanx.control import interfaces, messages
from phalanx.control.member import Endpoint, Member
from phalanx.errors import LaunchError
from phalanx.launcher.agent.worker import WorkerFailure
from phalanx.launcher.coordination.actions import (
    Action,
    EndRun,
    HaltWorkers,
    HoldWorkers,
    RegroupPlan,
    SignalWorkers,
    StopWorkers,
)
from phalanx.launcher.coordination.coordinator import AgentView, AttemptReport, RunResult, StartAttempt
from phalanx.launcher.coordination.rank_assignment import assign_seats, node_info
from phalanx.launcher.coordination.rendezvous_config import RendezvousConfig
from phalanx.launcher.output.console import Console
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder

_LONGEST = 1 << 14  # characters of a text for the leader
_DRAIN = 10.0  # seconds to forward the rest of the output


def leader_endpoints(rendezvous: RendezvousConfig) -> Callable[[], Sequence[Endpoint]]:
    """Return a function that lists where the leader may be, the most likely first. Call it before each try."""

    def where() -> list[Endpoint]:
        found = [Endpoint(address, rendezvous.port) for address in rendezvous.addresses]
        if rendezvous.host is not None and rendezvous.port:
            found.append(Endpoint(rendezvous.host, rendezvous.port))
        place = rendezvous.leader_file.read() if rendezvous.leader_file is not None else None
        if place is not None:
            found += [Endpoint(address, place.port) for address in place.addresses]
        return list(dict.fromkeys(found))

    return where


async def excuse(rendezvous: RendezvousConfig, why: str) -> None:
    """Tell the leader, if there is one, why this node cannot take part."""
    member = Member(
        rendezvous.token,
        node_info(None, rendezvous, why[: 1 << 14]),
        leader_endpoints(rendezvous),
        events=_IgnoredEvents(),
    )
    await member.excuse()


class _IgnoredEvents:
    def heard(self, message: messages.FromLeader) -> None: ...
    def lost(self, why: str, *, silent: bool) -> None: ...
    def note(self, text: str) -> None: ...
    def waiting(self, text: str) -> None: ...


class LeaderLossHandler(Protocol):
    """What replaces a lost leader (failover.py)."""

    def leader_lost(self, why: str, *, silent: bool) -> None:
        """Join the next leader, or become it. `silent`: the leader may still be alive."""


class FollowerCoordinator:
    """Joins the leader, performs what it orders, and reports to it."""

    leads = False

    def __init__(
        self, plan: Plan, rendezvous: RendezvousConfig, folder: RunFolder, console: Console, *, port: int = 0
    ) -> None:
        self.peer_list: messages.PeerList | None = None  # the other nodes of an elastic run
        self.failover: LeaderLossHandler | None = None
        self.attempt = 0
        self.ordered = 0  # the latest attempt that the leader ordered: this node may not have started it yet
        self.generation = 0
        self.readiness = (False, False, False)  # of the workers here: called, ended, ready
        self._plan = plan
        self._rendezvous = rendezvous
        self._folder = folder
        self._console = console
        self._agent: AgentView | None = None
        self._node_info = node_info(plan, rendezvous, door=port)
        self._member = Member(rendezvous.token, self._node_info, leader_endpoints(rendezvous), events=self)
        self._inbox: asyncio.Queue[messages.Start | messages.EndMessage] = asyncio.Queue()
        self._lost = ""
        self._started = False
        self._running = False  # an attempt is ordered and has not ended here
        self._leaving = False  # this node leaves an elastic run
        self.log_forwarder: LogForwarder | None = LogForwarder(self._send, lambda: self._member.waiting)

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent = agent

    def _send(self, message: messages.Message) -> None:
        """Send a message to the current leader."""
        self._member.send(message)

    async def join(self) -> None:
        """Join the leader, and name the run folder as it says. Raises JoinError."""
        welcome = await self._member.join(self._rendezvous.join_timeout)
        try:
            self._folder.join(welcome.run, welcome.member)
        except OSError as error:
            raise LaunchError(
                f"the run folder cannot be made: {error}", fix="free the disk, or --log-dir DIR"
            ) from error
        for text in welcome.notes:
            self.note(text)
        self._node_info = msgspec.structs.replace(self._node_info, member=welcome.member)
        at = f"{welcome.leader} at {self._member.leader_address}"
        self.note(f"joined {at} as {self._rendezvous.noun} {welcome.member}, output in {self._folder.path}")

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Wait for the leader to start the first attempt or to end the run."""
        return await self._next_order()

    async def _next_order(self) -> StartAttempt | RunResult:
        next_ = await self._inbox.get()
        if isinstance(next_, messages.EndMessage):
            # If all nodes share a terminal, only node 0 prints the result.
            return RunResult(next_.code, next_.text if self._rendezvous.echo or self._lost else "")
        if self._started and next_.attempt > self.attempt:
            self.note(f"starting all ranks again: restart {next_.attempt}", repeats=True)
        if next_.place.spare:
            self.note("all ranks are assigned: this node is a spare")
        self._started = True
        self.attempt, self.readiness = next_.attempt, (False, False, False)
        self.generation = max(self.generation, next_.generation)
        return StartAttempt(next_.attempt, self._assigned_plan(next_.place), None, next_.generation)

    def _assigned_plan(self, place: messages.StartRanks) -> Plan:
        member = self._member
        seats = assign_seats(self._plan, place)
        plan = self._plan.seated(
            seats,
            topology=place.topology,
            master=(member.leader_address, place.store_port),
            interface=interfaces.owner(member.own_address, interfaces.survey()),
            spare=place.spare,
        )
        prefixes = {seat.rank: plan.line_prefix(seat, os.uname().nodename) for seat in seats}
        self._console.settle(plan.group.world_size, {rank: text for rank, text in prefixes.items() if text is not None})
        return plan

    # -- messages of the leader

    def heard(self, message: messages.FromLeader) -> None:
        """Handle a message of the leader."""
        match message:
            case messages.Waiting():
                self.waiting(message.text)
            case messages.Start() | messages.EndMessage():
                if self._running and isinstance(message, messages.EndMessage):
                    self._act(self._stop_workers("the run has ended at node 0"))
                if isinstance(message, messages.Start):
                    self._running, self.ordered = True, message.attempt
                self.waiting(None)
                self._inbox.put_nowait(message)
            case messages.Regroup():
                if self._running and message.attempt == self.ordered:
                    self.generation = message.generation
                    plan = self._assigned_plan(message.place)
                    self._act(RegroupPlan(message.generation, message.why, plan, None, message.halt))
            case messages.Hold():
                if self._running and message.attempt == self.attempt:
                    self._act(HoldWorkers(message.why))
            case messages.PeerList():
                self.peer_list = message
            case messages.HaltAll():
                if self._running:
                    self._act(HaltWorkers(message.step))
            case messages.Stop():
                self._stop(message)
            case messages.ForwardSignal():
                self._act(SignalWorkers(signal.Signals(message.signal)))
            case messages.RpcFrame():
                if self._agent is not None:
                    self._agent.receive_rpc(None, message)
            case messages.NoteMessage():
                self.note(message.text)

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return nothing: a follower has no members."""
        return {}

    @property
    def skew(self) -> float:
        """Return the clock of this node minus the leader's, in seconds."""
        return self._member.skew

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Send a frame to the leader. One to another member is dropped."""
        if to is None:
            self._member.send(frame)

    def address(self, member: int) -> str:  # noqa: ARG002
        """Return an empty address: a follower knows only its leader."""
        return ""

    def _stop(self, stop: messages.Stop) -> None:
        number = signal.Signals(stop.signal)
        if stop.ends:
            self._act(EndRun(number, stop.reason))
        elif self._running:  # else the attempt has already ended here
            self._act(StopWorkers(number, stop.reason, stop.grace))

    def _stop_workers(self, reason: str) -> StopWorkers:
        return StopWorkers(signal.SIGTERM, reason, self._plan.shutdown.failure_timeout)

    def _act(self, action: Action) -> None:
        if self._agent is not None:
            self._agent.perform(action)

    def lost(self, why: str, *, silent: bool) -> None:
        """Handle the loss of the leader: fail over in an elastic run, else end."""
        if self.failover is not None and self.peer_list is not None and not self._leaving:
            self.failover.leader_lost(why, silent=silent)
        else:
            self.give_up(why)

    def give_up(self, why: str) -> None:
        """End the run on this node, because there is no leader."""
        self._lost = why
        self._inbox.put_nowait(messages.EndMessage(code=1, text=f"node 0 is lost: {why}"))
        self._act(self._stop_workers("node 0 is lost"))

    @property
    def id(self) -> int:
        """Return the number of this member."""
        return self._node_info.member or 0

    @property
    def running(self) -> bool:
        """Return whether an attempt is ordered and has not ended here."""
        return self._running

    @property
    def leader_endpoint(self) -> Endpoint | None:
        """Return where the leader listens."""
        return self._member.door

    async def follow(self, where: Endpoint, timeout: float) -> None:
        """Join another leader in place of the lost one. Raises JoinError."""
        info = msgspec.structs.replace(self._node_info, engaged=self._engaged())
        before, member = self._member, Member(self._rendezvous.token, info, lambda: [where], events=self)
        self._member = member  # its messages may arrive before join returns
        await before.drop()
        await member.join(timeout)

    def _engaged(self) -> messages.Engaged | None:
        if not self._running:
            return None
        called, ended, ready = self.readiness
        return messages.Engaged(
            attempt=self.ordered, generation=self.generation, called=called, ended=ended, ready=ready
        )

    async def drop(self) -> None:
        """Close the connection to a lost leader: this node takes its place."""
        await self._member.drop()

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line through the agent."""
        if self._agent is not None:
            self._agent.note(text, repeats=repeats)

    def waiting(self, text: str | None) -> None:
        """Show what this node waits for."""
        if self._agent is not None:
            self._agent.waiting(text)

    # -- the end of an attempt

    async def wait_for_others(self) -> None:
        """Return at once: a follower hosts nothing."""

    def is_last_attempt(self, *, failed: bool) -> bool:  # noqa: ARG002
        """Return whether the leader is lost: only the leader knows otherwise."""
        return bool(self._lost)

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Report the failure to the leader. Stop the workers at once if they cannot regroup."""
        self._member.send(
            messages.Failing(
                rank=failure.rank,
                reason=failure.reason,
                time=failure.time,
                place=failure.place[:1000],
                lived=failure.lived,
                step=failure.step,
                generation=failure.generation,
            )
        )
        called, ended, _ = self.readiness
        if not called or ended:
            return self._stop_workers(failure.reason)
        return None  # the leader decides

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:
        """Report the readiness to the leader."""
        self.readiness = (called, ended, ready)
        self._member.send(messages.RegroupReady(called=called, ended=ended, ready=ready))

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Report the first step to the leader."""
        self._member.send(
            messages.ProgressMessage(generation=message.generation, step=message.step, before=message.before)
        )

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Send what a rank reports about a halt to the leader."""
        match message:
            case worker_messages.HaltAck():
                self._member.send(
                    messages.NodeHaltAck(
                        rank=rank, step=message.step, generation=message.generation, stuck=message.stuck
                    )
                )
            case worker_messages.HaltedAt():
                self._member.send(messages.NodeHalted(step=message.step))

    def preempt(self, number: signal.Signals) -> bool:
        """Ask the leader for a preemption. False where it cannot help."""
        # From an elastic run this node leaves, and the others continue.
        taken = self._running and self.readiness[0] and not self._lost and not self._rendezvous.elastic
        if taken:  # node 0 ends the run, with a checkpoint or without
            self._member.send(messages.Signalled(signal=number, preempt=True))
        return taken

    def signal_received(self, number: signal.Signals) -> None:
        """Report the signal to the leader, and end here if the leader does not decide."""
        # Before the start a node that left may join again: the others wait for it.
        if self._running or self._started:
            self._member.send(messages.Signalled(signal=number))
        self._leaving = self._rendezvous.elastic and number == signal.SIGTERM
        if not (self._running or self._started) or self._leaving:
            self._inbox.put_nowait(messages.EndMessage(code=128 + number))

    def forward_signal(self, number: signal.Signals) -> None:
        """Do nothing: the leader forwards signals."""

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Report to the leader, and wait for its next order."""
        self._running = False
        if self.log_forwarder is not None and not self._lost:
            await self.log_forwarder.drained(_DRAIN)
        self._member.send(
            messages.Over(
                attempt=report.attempt,
                failed=len(report.deaths),
                by_themselves=report.failed,
                first=_first(report),
                trouble=report.trouble[:_LONGEST],
                left=report.left[:_LONGEST],
            )
        )
        return await self._next_order()

    def announce_result(self, code: int, text: str) -> None:
        """Do nothing: the leader announces the result."""

    async def close(self, code: int, text: str) -> None:
        """Leave the run."""
        if self.log_forwarder is not None:
            self.log_forwarder.close()
        with contextlib.suppress(ConnectionError):
            await self._member.leave(min(code, 255), text[:_LONGEST])


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
