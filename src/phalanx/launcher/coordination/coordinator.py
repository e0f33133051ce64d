"""Whoever else takes part in a run. The agent asks when to begin, tells how it went, and hears what to do next.

Alone       one node: nobody to ask
Leading     node 0 of several (leading.py)
Following   every other node (following.py)
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
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.recover.decision import RecoveryAction


@dataclass(frozen=True)
class StartAttempt:
    """Begin an attempt."""

    attempt: int
    plan: Plan
    listener: socket.socket | None  # of the store, where this node hosts it
    generation: int = 0  # that of the group which this node comes to


@dataclass(frozen=True)
class AttemptReport:
    """How an attempt went on this node."""

    attempt: int
    deaths: Sequence[root_cause.ProcessFailure] = ()
    block: str = ""  # what to tell about the first of them
    trouble: str = ""  # it ended for a reason that is no worker's
    failed: int = 0  # workers that failed by themselves
    left: str = ""  # processes that workers left running, and what will be done about them


@dataclass(frozen=True)
class RunResult:
    """The run is over."""

    code: int
    text: str = ""


class AgentView(Protocol):
    """The agent, as far as its coordinator knows it."""

    def perform(self, action: Action) -> None:
        """Execute a decision that no call of the agent has asked for, such as one that came from another node."""

    def note(self, text: str, *, repeats: bool = False) -> None: ...
    def waiting(self, text: str | None) -> None: ...
    def receive_rpc(self, sender: int | None, frame: messages.RpcFrame) -> None: ...


class Coordinator(Protocol):
    @property
    def leads(self) -> bool:
        """Whether this node decides for all."""
        ...

    def members(self) -> dict[int, tuple[int, ...]]:
        """Of whom this node is the leader, itself left out: their ranks."""
        ...

    @property
    def skew(self) -> float:
        """The clock of this node minus that of the one that leads."""
        ...

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """To a member; None: to the leader, where that is another node."""

    def address(self, member: int) -> str:
        """Of a member, as seen from here; empty: nobody knows."""
        ...

    @property
    def log_forwarder(self) -> LogForwarder | None:
        """Who else reads what workers write."""
        ...

    def attach(self, agent: AgentView) -> None: ...

    async def join(self) -> None:
        """Until everybody is here. Raises JoinError."""

    async def first_attempt(self) -> StartAttempt | RunResult:
        """What to do first."""

    async def wait_for_others(self) -> None:
        """Until no other node needs what this one hosts: ranks elsewhere may still use the store."""

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Whether it is certain that no other attempt follows this one."""
        ...

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """What to do next."""

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Decide what to do about a worker of this node that has failed. None: nothing yet; another node decides."""

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:
        """Workers here can regroup; some are through with their work, and cannot any more; all are there."""

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """A group that has formed anew has committed its first step."""

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """What a rank here says about halting."""

    def preempt(self, number: signal.Signals) -> bool:
        """A scheduler takes the machine away. False: there can be no checkpoint, and the run ends as by any signal."""
        ...

    def signal_received(self, number: signal.Signals) -> None:
        """The user, or a scheduler, ends the run here."""

    def forward_signal(self, number: signal.Signals) -> None:
        """A signal that does not end anything, for the workers of all nodes."""

    def announce_result(self, code: int, text: str) -> None:
        """The run has ended, and this node still waits for its own processes: the others need not."""

    async def close(self, code: int, text: str) -> None: ...


class SingleNodeCoordinator:
    """A run on one node."""

    log_forwarder: LogForwarder | None = None
    leads = True
    skew = 0.0

    def members(self) -> dict[int, tuple[int, ...]]:
        return {}

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        pass

    def address(self, member: int) -> str:  # noqa: ARG002
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
        self._agent = agent

    async def join(self) -> None:
        pass

    async def first_attempt(self) -> StartAttempt | RunResult:
        return StartAttempt(0, self._plan, self._listener)

    async def wait_for_others(self) -> None:
        pass

    def is_last_attempt(self, *, failed: bool) -> bool:
        return not failed or not self._restarts

    @property
    def _restarts(self) -> bool:
        """All ranks are started again. Not when the machine is taken away: the next run goes on from the checkpoint."""
        return self._recoveries.latest_action is RecoveryAction.RESTART and not self._preemption.begun

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
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
        if self._preemption.halted:  # nothing is lost by it
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
        self._can_regroup = called and not ended
        self._preemption.regroup_ready(called, ended)

    # -- preemption

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        self._preemption.receive(rank, message, self._recoveries.generation)

    def preempt(self, number: signal.Signals) -> bool:
        return self._preemption.begin(number, self._plan.placement.world_size)

    def note(self, text: str, *, repeats: bool = False) -> None:
        if self._agent is not None:
            self._agent.note(text, repeats=repeats)

    def halt(self, step: int | None) -> None:
        self._act(HaltWorkers(step))

    def regroup_and_halt(self, why: str) -> None:
        if self._can_regroup:
            self._recoveries.next_generation()
            self._act(self._regroup_plan(why, halt=True))

    def stop(self, reason: str) -> None:
        self._act(self._stop_workers(reason))

    def end_run(self, number: signal.Signals, reason: str) -> None:
        self._act(EndRun(number, reason))

    def first_step(self, message: worker_messages.FirstStep) -> None:
        text = self._recoveries.first_step(message.generation, message.step, message.before)
        if text and self._agent is not None:
            self._agent.note(text, repeats=True)

    def signal_received(self, number: signal.Signals) -> None:
        pass

    def forward_signal(self, number: signal.Signals) -> None:
        pass

    def announce_result(self, code: int, text: str) -> None:
        pass

    async def close(self, code: int, text: str) -> None:
        pass


def record_failure(folder: RunFolder, death: root_cause.ProcessFailure, attempt: int) -> None:
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
