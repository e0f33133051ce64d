"""The coordinator of a run on one node."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence

from phalanx.contract.exit_codes import PREEMPTED
from phalanx.contract.messages import worker_messages
from phalanx.control import messages
from phalanx.launcher.actions import AcceptLoss, Action, RefuseRegroup, RegroupPlan, StartAttempt, StopWorkers
from phalanx.launcher.coordination.coordinator import AgentProxy, AgentView, AttemptReport, RunResult, record_failure
from phalanx.launcher.coordination.preemption import Preemption, PreemptionAction, RegroupAndHalt
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs import failure_report, root_cause
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import RecoveryAction


class SingleNodeLinks:
    """The links of a run on one node: none."""

    leads = True
    skew = 0.0

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return nothing: there are no followers."""
        return {}

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Do nothing: there is no other node."""

    def backlog(self, to: int | None) -> int:  # noqa: ARG002
        """Return 0: there is no other node."""
        return 0

    def on_trial(self) -> frozenset[int]:
        """Return no ranks: there is no other node."""
        return frozenset()

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:  # noqa: ARG002
        """Return False: there is only this node."""
        return False

    def address(self, member: int) -> str:  # noqa: ARG002
        """Return an empty address: there is no other node."""
        return ""


class SingleNodeCoordinator:
    """A run on one node."""

    log_forwarder: LogForwarder | None = None

    def __init__(self, plan: Plan, folder: RunFolder, listener: socket.socket) -> None:
        self.links = SingleNodeLinks()
        self._plan = plan
        self._folder = folder
        self._listener = listener
        self._agent = AgentProxy()
        self._recoveries = Recoveries(plan.recovery.policy, folder)
        self._can_regroup = False
        self._preemption = Preemption(plan, folder, perform=self._perform_preemption, note=self._agent.note)

    def attach(self, agent: AgentView) -> None:
        """Set the agent."""
        self._agent.attach(agent)

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
        """Return whether all ranks are started again. Not after a preemption: the next run resumes from the
        checkpoint.
        """
        return self._recoveries.latest_action is RecoveryAction.RESTART and not self._preemption.begun

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Return a restart if the latest decision was one, otherwise the result of the run."""
        self._preemption.close()
        if self._preemption.halted:
            return RunResult(PREEMPTED, self._preemption.final_text(self._recoveries.summary()))
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
        text = failure_report.with_afterwards(report.block, failure_report.afterwards(death, report.kinds))
        if not self._restarts:
            return RunResult(death.exit_code, self._recoveries.final_text(text))
        return self._restart(report.attempt, text)

    def _restart(self, attempt: int, why: str) -> StartAttempt:
        self._agent.note(f"{why}\nphalanx: {self._recoveries.restarting()}", repeats=True)
        return StartAttempt(attempt + 1, self._plan, self._listener, self._recoveries.generation)

    def worker_failed(self, failure: WorkerFailure) -> Action:
        """Regroup, stop the workers, or accept the loss once a checkpoint is on disk."""
        if self._preemption.halted:  # a checkpoint is on disk
            return AcceptLoss()
        if self._recoveries.decide(failure, can_regroup=self._can_regroup) is RecoveryAction.REGROUP:
            return self._regroup_plan(failure.reason, halt=self._preemption.begun)
        return StopWorkers(signal.SIGTERM, failure.reason, self._plan.shutdown.failure_timeout)

    def _regroup_plan(self, why: str, *, halt: bool) -> RegroupPlan:
        return RegroupPlan(self._recoveries.generation, why, self._plan, self._listener, halt)

    def regroup_ready(self, connected: bool, finished: bool, all_connected: bool) -> None:  # noqa: ARG002
        """Record whether the workers can regroup."""
        self._can_regroup = connected and not finished
        self._preemption.regroup_ready(connected, finished)

    def rank_left(self) -> None:
        """Tell the other workers not to wait for a group."""
        self._agent.perform(RefuseRegroup())

    # -- preemption

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Pass the message to the preemption."""
        self._preemption.receive(rank, message, self._recoveries.generation)

    def preempt(self, number: signal.Signals) -> bool:
        """Begin a preemption."""
        return self._preemption.begin(number, self._plan.group.world_size)

    def _perform_preemption(self, action: PreemptionAction) -> None:
        if not isinstance(action, RegroupAndHalt):
            self._agent.perform(action)
        elif self._can_regroup:
            self._recoveries.next_generation()
            self._agent.perform(self._regroup_plan(action.why, halt=True))

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Print how long the recovery took."""
        text = self._recoveries.first_step(message.generation, message.step, message.before)
        if text:
            self._agent.note(text, repeats=True)

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> None:
        """Print it and count it."""
        self._agent.note(self._recoveries.batch_skipped(message), repeats=True)

    def signal_received(self, number: signal.Signals) -> None:
        """Do nothing: there is no other node."""

    def forward_signal(self, number: signal.Signals) -> None:
        """Do nothing: there is no other node."""

    def announce_result(self, code: int, text: str) -> None:
        """Do nothing: there is no other node."""

    async def close(self, code: int, text: str) -> None:
        """Do nothing: there is nothing to close."""
