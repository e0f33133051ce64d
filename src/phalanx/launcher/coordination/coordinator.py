"""The interface between an agent and its coordinator, and the coordinator of a run on one node.

The agent asks its coordinator when to start an attempt, reports how it ended, and gets the next one or the result.

SingleNodeCoordinator   one node: decides by itself
LeaderCoordinator       node 0 of several: decides for all nodes (leader.py)
FollowerCoordinator     every other node: asks the leader (follower.py)
FailoverCoordinator     a follower that becomes the leader if node 0 is lost (failover.py)
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.contract import events, worker_messages
from phalanx.control import messages
from phalanx.launcher.agent.preemption import Preemption
from phalanx.launcher.agent.worker import WorkerFailure
from phalanx.launcher.coordination.actions import AcceptLoss, Action, EndRun, HaltWorkers, RegroupPlan, StopWorkers
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.ipc.node_rpc import RpcCarrier
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.recover.decision import RecoveryAction


@dataclass(frozen=True)
class StartAttempt:
    """Start an attempt."""

    attempt: int
    plan: Plan
    listener: socket.socket | None  # of the store, if this node hosts it
    generation: int = 0  # of the group that this node joins


@dataclass(frozen=True)
class AttemptReport:
    """How an attempt ended on this node."""

    attempt: int
    deaths: Sequence[root_cause.ProcessFailure] = ()
    block: str = ""  # the message about the first of them
    trouble: str = ""  # why it ended, if no worker is the cause
    failed: int = 0  # workers that failed, not counting those that were stopped
    left: str = ""  # processes that workers left running, and what happens to them


@dataclass(frozen=True)
class RunResult:
    """The run is over: its exit code, and the message to print."""

    code: int
    text: str = ""


class AgentView(Protocol):
    """The agent, as far as its coordinator needs it."""

    def perform(self, action: Action) -> None:
        """Execute a decision that the agent has not asked for, such as one of another node."""

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line and write it to the run folder. `repeats`: an event with the same content is already there."""

    def waiting(self, text: str | None) -> None:
        """Show what the node waits for. None: it waits no more."""

    def receive_rpc(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Take a frame from a member. `sender` None: from the leader."""


class Coordinator(RpcCarrier, Protocol):
    """Decides for a node when an attempt begins and what follows a failure."""

    @property
    def log_forwarder(self) -> LogForwarder | None:
        """Return what sends the output of workers to the leader. None: nothing does."""
        ...

    def attach(self, agent: AgentView) -> None:
        """Set the agent that performs the actions of this coordinator. Called once, before `join`."""

    async def join(self) -> None:
        """Wait until all nodes have joined. Raises JoinError."""

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Return the first attempt, or the result if there is none."""

    async def wait_for_others(self) -> None:
        """Wait until no other node needs what this node hosts, such as the store."""

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return whether certainly no attempt follows this one. `failed`: it failed on this node."""
        ...

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Report how an attempt ended here, and return the next attempt or the result of the run."""

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Decide about a worker of this node that failed. None: nothing to do until another node has decided."""

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:
        """Report whether the workers of this node can regroup, each time that this changes.

        `called`: a worker has connected, so the script can regroup. `ended`: a worker has finished, so no new group can
        form. `ready`: all workers have connected.
        """

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Report that a group that formed after a failure has committed its first step."""

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Take what a rank of this node reports about a halt."""

    def preempt(self, number: signal.Signals) -> bool:
        """Begin to halt the run with a checkpoint. False: there can be no checkpoint, and the signal ends the run."""
        ...

    def signal_received(self, number: signal.Signals) -> None:
        """Report a signal that ends the run, received on this node."""

    def forward_signal(self, number: signal.Signals) -> None:
        """Forward a signal that does not end the run to the other nodes."""

    def announce_result(self, code: int, text: str) -> None:
        """Tell the other nodes that the run has ended, while this one still waits for its processes."""

    async def close(self, code: int, text: str) -> None:
        """Tell the other nodes the result, and close all connections and sockets."""


class SingleNodeCoordinator:
    """A run on one node."""

    log_forwarder: LogForwarder | None = None
    leads = True
    skew = 0.0

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return nothing: there are no followers."""
        return {}

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Do nothing: there is no other node."""

    def address(self, member: int) -> str:  # noqa: ARG002
        """Return an empty address: there is no other node."""
        return ""

    def __init__(self, plan: Plan, folder: RunFolder, listener: socket.socket) -> None:
        self._plan = plan
        self._folder = folder
        self._listener = listener
        self._agent: AgentView | None = None
        self._recoveries = Recoveries(plan.recovery.policy, folder)
        self._can_regroup = False
        self._preemption = Preemption(plan, folder, self)

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent = agent

    async def join(self) -> None:
        """Return at once."""

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Return the first attempt."""
        return StartAttempt(0, self._plan, self._listener)

    async def wait_for_others(self) -> None:
        """Return at once."""

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return whether no restart follows."""
        return not failed or not self._restarts

    @property
    def _restarts(self) -> bool:
        """Return whether all ranks are started again. Not after a preemption: the next run resumes the checkpoint."""
        return self._recoveries.latest_action is RecoveryAction.RESTART and not self._preemption.begun

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Return a restart if the latest decision was one, else the result of the run."""
        self._preemption.close()
        if self._preemption.halted:
            return RunResult(os.EX_TEMPFAIL, self._preemption.final_text(self._recoveries.summary()))
        if report.trouble and self._restarts:
            return self._restart(report.attempt, report.trouble)
        if report.trouble:
            return RunResult(128 + signal.SIGKILL, self._recoveries.final_text(report.trouble))
        if not report.deaths:
            return RunResult(0, self._recoveries.summary())
        death = root_cause.first_cause(report.deaths)
        if death is None:
            return RunResult(1)
        record_failure(self._folder, death, report.attempt)
        block = root_cause.counted(report.block, report.failed - 1)
        if not self._restarts:
            return RunResult(death.exit_code, self._recoveries.final_text(block))
        return self._restart(report.attempt, block)

    def _restart(self, attempt: int, why: str) -> StartAttempt:
        if self._agent is not None:
            self._agent.note(f"{why}\nphalanx: {self._recoveries.restarting()}", repeats=True)
        return StartAttempt(attempt + 1, self._plan, self._listener, self._recoveries.generation)

    def worker_failed(self, failure: WorkerFailure) -> Action:
        """Regroup, stop the workers, or accept the loss once a checkpoint is on disk."""
        if self._preemption.halted:  # a checkpoint is on disk
            return AcceptLoss()
        if self._recoveries.decide(failure, can_regroup=self._can_regroup) is RecoveryAction.REGROUP:
            return self._regroup_plan(failure.reason, halt=self._preemption.begun)
        return self._stop_workers(failure.reason)

    def _stop_workers(self, reason: str) -> StopWorkers:
        return StopWorkers(signal.SIGTERM, reason, self._plan.shutdown.failure_timeout)

    def _act(self, action: Action) -> None:
        if self._agent is not None:
            self._agent.perform(action)

    def _regroup_plan(self, why: str, *, halt: bool) -> RegroupPlan:
        return RegroupPlan(self._recoveries.generation, why, self._plan, self._listener, halt)

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:  # noqa: ARG002
        """Remember whether the workers can regroup."""
        self._can_regroup = called and not ended
        self._preemption.regroup_ready(called, ended)

    # -- preemption

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Pass the message to the preemption."""
        self._preemption.receive(rank, message, self._recoveries.generation)

    def preempt(self, number: signal.Signals) -> bool:
        """Begin a preemption."""
        return self._preemption.begin(number, self._plan.group.world_size)

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line through the agent."""
        if self._agent is not None:
            self._agent.note(text, repeats=repeats)

    def halt(self, step: int | None) -> None:
        """Have the workers report their step, or halt at `step`."""
        self._act(HaltWorkers(step))

    def regroup_and_halt(self, why: str) -> None:
        """Have the workers regroup and write a checkpoint, if they can regroup."""
        if self._can_regroup:
            self._recoveries.next_generation()
            self._act(self._regroup_plan(why, halt=True))

    def stop(self, reason: str) -> None:
        """Stop the workers."""
        self._act(self._stop_workers(reason))

    def end_run(self, number: signal.Signals, reason: str) -> None:
        """End the run as by a signal of the user."""
        self._act(EndRun(number, reason))

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Print how long the recovery took."""
        text = self._recoveries.first_step(message.generation, message.step, message.before)
        if text and self._agent is not None:
            self._agent.note(text, repeats=True)

    def signal_received(self, number: signal.Signals) -> None:
        """Do nothing: there is no other node."""

    def forward_signal(self, number: signal.Signals) -> None:
        """Do nothing: there is no other node."""

    def announce_result(self, code: int, text: str) -> None:
        """Do nothing: there is no other node."""

    async def close(self, code: int, text: str) -> None:
        """Do nothing: there is nothing to close."""


def record_failure(folder: RunFolder, death: root_cause.ProcessFailure, attempt: int) -> None:
    """Write the first failure of an attempt to the run folder."""
    folder.event(
        events.WorkerFailed(
            time=time.time(),
            rank=death.rank,
            summary=root_cause.summary(death),
            code=death.exit_code,
            attempt=attempt,
            blame=tuple(death.blame),
        )
    )
