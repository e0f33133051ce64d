"""The results of an attempt on all nodes, and what follows: the result of the run, or a restart."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from phalanx.contract.exit_codes import PREEMPTED
from phalanx.control import messages
from phalanx.control.leader.members import Members
from phalanx.launcher.coordination.coordinator import AgentProxy, AttemptReport, RunResult, record_failure
from phalanx.launcher.coordination.recoveries import Recoveries
from phalanx.launcher.runs import failure_report, root_cause
from phalanx.launcher.runs.run_folder import RunFolder

_LATE = 2.0  # seconds by which a node may detect an exit later than another node detects its consequence


@dataclass(frozen=True)
class Restart:
    """Start all ranks again. `text`: the message to print."""

    text: str


class AttemptResults:
    """Collects the reports of the members, and decides what follows the end of an attempt.

    `failure`: why the run ends, if no worker is the cause. `signal`: the signal that ends the run. `nodes_changed`: all
    ranks restart because nodes joined or left.
    """

    def __init__(self, agent: AgentProxy, members: Members, folder: RunFolder, recoveries: Recoveries) -> None:
        self.failure: RunResult | None = None
        self.signal: signal.Signals | None = None
        self.nodes_changed = False
        self._agent = agent
        self._members = members
        self._folder = folder
        self._recoveries = recoveries
        self._failure_time = 0.0
        self._reports: dict[int, messages.AttemptEnded] = {}

    def start_attempt(self) -> None:
        """Drop the reports of the previous attempt."""
        self._reports.clear()

    def add(self, member: int, report: messages.AttemptEnded) -> None:
        """Add the report of a member."""
        self._reports[member] = report

    def report(self, member: int) -> messages.AttemptEnded | None:
        """Return the report of a member. None: it has not reported."""
        return self._reports.get(member)

    def remove(self, member: int) -> None:
        """Drop the report of a member that has left or is lost."""
        self._reports.pop(member, None)

    def has_all(self, members: Collection[int]) -> bool:
        """Return whether all these members have reported."""
        return self._reports.keys() >= set(members)

    def fail(self, result: RunResult) -> None:
        """End the run with this result, unless it has already failed."""
        if self.failure is None:
            self.failure, self._failure_time = result, time.time()

    def ended(self) -> RunResult | None:
        """Return the result of a run that must end before the next attempt."""
        return RunResult(128 + self.signal) if self.signal is not None else self.failure

    def is_last(self, *, failed: bool, restarts: bool) -> bool:
        """Return whether no restart follows. `restarts`: the latest decision was a restart."""
        if self.nodes_changed and self.failure is None:
            return False
        failed = failed or any(report.failed or report.trouble for report in self._reports.values())
        return not failed or self.failure is not None or not restarts

    def evaluate(
        self, report: AttemptReport, *, restarts: bool, preempted: str | None, absent: Collection[int]
    ) -> RunResult | Restart:
        """Compare the failures of all nodes, and return a restart or the result of the run.

        `report`: of this node. `restarts`: the latest decision was a restart. `preempted`: the last message of a run
        that has halted with a checkpoint. `absent`: members with ranks that are not connected.
        """
        self._evaluate_trouble(report, restarts=restarts)
        if self.signal is not None:
            return RunResult(128 + self.signal)
        if preempted is not None:
            return RunResult(PREEMPTED, preempted)
        failures, blocks = self._failures(report)
        first = root_cause.first_cause(failures)
        # The loss of a node makes all other ranks fail. A rank that failed before that is the cause.
        if self.failure is not None and (first is None or root_cause.follows(first, self._failure_time)):
            return self.failure
        if self.nodes_changed:
            self.nodes_changed = False
            return Restart(self._recoveries.restarting())
        failed = len(report.deaths) + sum(each.failed for each in self._reports.values())
        if not failed and self.has_all(absent):
            self._note_left_processes()
            return RunResult(0, self._recoveries.summary())
        if first is None:
            return RunResult(1)
        if not first.blame and (blame := failure_report.left_alone(first, self._clean_exits(report))):
            first = replace(first, blame=blame)  # no rank of its own node has left it alone
            blocks[first.rank] = failure_report.blamed(blocks[first.rank], first)
        record_failure(self._folder, first, report.attempt)
        if not restarts or self.failure is not None or absent:
            return RunResult(first.exit_code, self._recoveries.final_text(blocks[first.rank]))
        return Restart(f"{blocks[first.rank]}\nphalanx: {self._recoveries.restarting()}")

    def _evaluate_trouble(self, report: AttemptReport, *, restarts: bool) -> None:
        """Restart or end if a node had a problem that no worker caused."""
        troubles = [report.trouble, *(each.trouble for each in self._reports.values())]
        trouble = next(filter(None, troubles), "")
        if trouble and restarts and self.failure is None:
            self.nodes_changed = True
            self._agent.note(trouble)
        elif report.trouble:
            self.fail(RunResult(128 + signal.SIGKILL, report.trouble))

    def _note_left_processes(self) -> None:
        for member, report in self._reports.items():
            if report.left:
                self._agent.note(f"{self._members.name(member)}: {report.left}")

    def _failures(self, report: AttemptReport) -> tuple[list[root_cause.ProcessFailure], dict[int, str]]:
        """Return the first failure of each node, by this node's clock, and the message about each rank."""
        kinds = [*report.kinds, *(kind for each in self._reports.values() for kind in each.kinds)]
        failures: list[root_cause.ProcessFailure] = []
        blocks: dict[int, str] = {}

        def add(failure: root_cause.ProcessFailure, block: str, where: str = "") -> None:
            failures.append(failure)
            blocks[failure.rank] = (
                failure_report.with_afterwards(block, failure_report.afterwards(failure, kinds)) + where
            )

        own = root_cause.first_cause(report.deaths)
        if own is not None:
            add(own, report.block)
        for member, each in self._reports.items():
            if each.first is not None:
                first = process_failure(each.first, self._members.skew(member))
                add(first, each.first.block, f"\n  on {self._members.name(member)}")
        return failures, blocks

    def _clean_exits(self, report: AttemptReport) -> list[root_cause.CleanExit]:
        """Return the ranks of all nodes that have exited without an error, by this node's clock."""
        found = list(report.exited)
        for member, each in self._reports.items():
            skew = self._members.skew(member)
            found += [root_cause.CleanExit(one.rank, one.time - skew - _LATE, one.in_training) for one in each.exited]
        return found


def process_failure(report: messages.FailureReport, skew: float) -> root_cause.ProcessFailure:
    """Return the first failure of a member, by this node's clock. `skew`: its clock minus ours."""
    return root_cause.ProcessFailure(
        rank=report.rank,
        code=report.code,
        time=report.time - skew,
        stopped=report.stopped,
        device=report.device,
        error=report.error,
        stderr=report.stderr,
        memory=report.memory,
        skew=skew,
        blame=report.blame,
    )
