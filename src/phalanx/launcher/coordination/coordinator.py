"""The interface between an agent and its coordinator.

The agent asks its coordinator when to start an attempt, reports how it ended, and gets the next one or the result.

SingleNodeCoordinator   one node: decides by itself (single_node.py)
LeaderCoordinator       node 0 of several: decides for all nodes (leader/)
FollowerCoordinator     every other node: asks the leader (follower/)
FailoverCoordinator     a follower that becomes the leader if node 0 is lost (follower/failover.py)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.contract import events
from phalanx.control import messages
from phalanx.launcher.actions import Action, StartAttempt
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.runs import failure_report, root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.context import RegroupObserver
from phalanx.launcher.workers.worker import WorkerFailure


@dataclass(frozen=True)
class AttemptReport:
    """How an attempt ended on this node."""

    attempt: int
    deaths: Sequence[root_cause.ProcessFailure] = ()
    block: str = ""  # the message about the first failure, without the failures of the other ranks
    trouble: str = ""  # why it ended, if no worker is the cause
    left: str = ""  # processes that workers left running, and what happens to them
    exited: Sequence[root_cause.CleanExit] = ()

    @property
    def kinds(self) -> tuple[messages.FailedRanks, ...]:
        """The ranks that failed, by kind of failure."""
        return failure_report.failed_ranks(self.deaths)


@dataclass(frozen=True)
class RunResult:
    """The run is over: its exit code, and the message to print."""

    code: int
    text: str = ""


class AgentView(Protocol):
    """The agent, as far as its coordinator needs it."""

    def perform(self, action: Action) -> None:
        """Execute a decision that the agent did not request, such as one of another node."""

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line and write it to the run folder. `repeats`: an event with the same content is already there."""

    def waiting(self, text: str | None) -> None:
        """Show what the node is waiting for. None: it is not waiting."""

    def receive_rpc(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Handle a frame from a member. `sender` None: from the leader."""

    @property
    def idle(self) -> float:
        """Return the seconds since a worker of this node last reported a newer step. 0: none ever did."""
        ...


class AgentProxy:
    """The agent, for the parts of a coordinator, which are created before the agent. Does nothing before `attach`."""

    def __init__(self) -> None:
        self._agent: AgentView | None = None

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent = agent

    def perform(self, action: Action | None) -> None:
        """Execute an action, if there is one."""
        if self._agent is not None and action is not None:
            self._agent.perform(action)

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line and write it to the run folder."""
        if self._agent is not None:
            self._agent.note(text, repeats=repeats)

    @property
    def idle(self) -> float:
        """Return the seconds since a worker of this node last reported a newer step. 0: none ever did."""
        return self._agent.idle if self._agent is not None else 0.0

    def waiting(self, text: str | None) -> None:
        """Show what the node is waiting for."""
        if self._agent is not None:
            self._agent.waiting(text)

    def receive_rpc(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Handle a frame from a member, or from the leader."""
        if self._agent is not None:
            self._agent.receive_rpc(sender, frame)


class Coordinator(RegroupObserver, Protocol):
    """Decides for a node when an attempt begins and what follows a failure. Workers report to it how they regroup."""

    @property
    def links(self) -> NodeLinks:
        """Return the other nodes, through which services of the agent send messages. Always the same object."""
        ...

    @property
    def log_forwarder(self) -> LogForwarder | None:
        """Return the object that sends the output of workers to the leader. None: output is not sent."""
        ...

    def attach(self, agent: AgentView) -> None:
        """Set the agent that performs the actions of this coordinator. Called once, before `join`."""

    async def join(self) -> None:
        """Wait until all nodes have joined. Raises JoinError."""

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Return the first attempt, or the result if there is none."""

    async def wait_for_others(self) -> None:
        """Wait until no other node needs services that this node hosts, such as the store."""

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return whether certainly no attempt follows this one. `failed`: it failed on this node."""
        ...

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Report how an attempt ended here, and return the next attempt or the result of the run."""

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Decide about a worker of this node that failed. None: nothing to do until another node has decided."""

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


def record_failure(folder: RunFolder, death: root_cause.ProcessFailure, attempt: int) -> None:
    """Write the first failure of an attempt to the run folder."""
    folder.event(
        events.WorkerFailed(
            time=time.time(),
            rank=death.rank,
            summary=failure_report.summary(death),
            code=death.exit_code,
            attempt=attempt,
            blame=tuple(death.blame),
        )
    )
