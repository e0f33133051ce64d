"""The attempts of a run on one node: each is started, ends, is cleaned up and reported to the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.launcher.actions import StartAttempt
from phalanx.launcher.agent.group_controller import GroupController
from phalanx.launcher.agent.stopping.end_request import EndRequest
from phalanx.launcher.agent.stopping.linger import LingeringProcesses
from phalanx.launcher.agent.watchers import Watchers
from phalanx.launcher.coordination.coordinator import AttemptReport, Coordinator, RunResult
from phalanx.launcher.forking.supervisor import ForkServerSupervisor
from phalanx.launcher.output.console.console import Console
from phalanx.launcher.runs import root_cause
from phalanx.launcher.workers.context import WorkerGroupContext
from phalanx.launcher.workers.worker_group import WorkerGroup

_DRAIN_TIMEOUT = 2.0  # seconds to read remaining data from the pipes of workers that have ended


class AttemptLoop:
    """Runs attempts until the coordinator returns the result of the run: `await AttemptLoop(...).run()`.

    `make_context` returns the context for the worker group of an attempt. `succeeded` is called when all nodes have
    succeeded, with the processes that ranks left running here.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        controller: GroupController,
        fork_server: ForkServerSupervisor,
        watchers: Watchers,
        end_request: EndRequest,
        *,
        note: Callable[[str], None],
        make_context: Callable[[StartAttempt], WorkerGroupContext],
        succeeded: Callable[[LingeringProcesses], None],
    ) -> None:
        self._coordinator = coordinator
        self._controller = controller
        self._fork_server = fork_server
        self._watchers = watchers
        self._end_request = end_request
        self._note = note
        self._make_context = make_context
        self._succeeded = succeeded

    async def run(self) -> RunResult:
        """Run attempts until the run is over."""
        next_ = await self._coordinator.first_attempt()
        while isinstance(next_, StartAttempt):
            self._end_request.raise_error()
            if not await self._controller.prepare(next_.plan):
                return RunResult(self._end_request.exit_code(self._fork_server.startup_error()))
            context = self._make_context(next_)
            group = await self._controller.start(next_, context)
            self._watchers.start(group)
            await group.over.wait()
            next_ = await self._finish(group, context)
        self._end_request.raise_error()
        return next_

    async def _finish(self, group: WorkerGroup, context: WorkerGroupContext) -> StartAttempt | RunResult:
        """Clean up after an attempt, report it, and return the next action."""
        await self._controller.settle()
        await self._coordinator.wait_for_others()
        self._watchers.attempt_over()
        group.close()
        try:
            if self._may_linger(group):
                left = LingeringProcesses(self._fork_server.orphans, ranks=group.workers.ranks, run=context.folder.name)
                return await self._finish_successful(group, left)
            if self._end_request.made or self._coordinator.is_last_attempt(failed=bool(group.workers.failed)):
                await self._fork_server.end()
            else:
                # Including the store: the next attempt gets an empty one on the same port, without keys of dead ranks.
                self._controller.release()
                await self._fork_server.end_processes()
            await group.output.drained(_DRAIN_TIMEOUT)
            await self._settle_forwarded(group)
            next_ = await self._report(self._attempt_report(group))
            self._settle_tracebacks(group, context.console)
            return next_
        finally:
            group.output.close()

    def _may_linger(self, group: WorkerGroup) -> bool:
        """Return whether all ranks here have succeeded and no attempt follows, so that their processes may keep
        running.
        """
        if self._end_request.made or self._fork_server.lost or group.workers.failed:
            return False
        last = self._coordinator.is_last_attempt(failed=False)
        return last if self._coordinator.links.leads else not last  # a follower returns True only if node 0 is lost

    async def _finish_successful(self, group: WorkerGroup, left: LingeringProcesses) -> StartAttempt | RunResult:
        """Report success. Processes that ranks left running continue until all nodes have ended, then for
        `--linger`.
        """
        limit = self._controller.plan.shutdown.linger
        await left.settle()
        if left.orphans:
            group.output.catch_up_all()  # they may keep the pipes open
        else:
            if left.helpers:
                await self._fork_server.end_processes()
            await group.output.drained(_DRAIN_TIMEOUT)
        await self._settle_forwarded(group)
        next_ = await self._report(replace(self._attempt_report(group), left=left.text(limit)))
        if isinstance(next_, StartAttempt):
            self._controller.release()
            await self._fork_server.end_processes()
            return next_
        if next_.code == 0 and not self._end_request.made:
            self._succeeded(left)
            if left.orphans:
                await self._linger(left, limit, next_)
        await self._fork_server.end()
        if self._fork_server.keep_orphans:
            group.output.leave()
        await group.output.drained(_DRAIN_TIMEOUT)
        return next_

    async def _linger(self, left: LingeringProcesses, limit: float | None, result: RunResult) -> None:
        """Wait for processes that ranks left running. The other nodes need not wait."""
        self._coordinator.announce_result(result.code, result.text)
        self._note(left.text(limit))
        self._fork_server.keep_orphans = limit is None
        if limit and not await left.wait(limit):
            self._note(left.text(limit, expired=True))

    def _settle_tracebacks(self, group: WorkerGroup, console: Console) -> None:
        """Show the tracebacks that no message reports: of ranks that succeeded, or of failures after Ctrl-C."""
        if self._end_request.signal is not None:
            console.drop_withheld(root_cause.stopped_by_signal)
            return
        console.release_withheld(_succeeded(group))
        console.drop_withheld()

    async def _settle_forwarded(self, group: WorkerGroup) -> None:
        """Do the same for the output that is sent to the leader, which shows nothing after the report."""
        stopped = self._end_request.signal is not None
        await group.output.settle_forwarded(
            succeeded=_succeeded(group), reported=root_cause.stopped_by_signal if stopped else None
        )

    async def _report(self, report: AttemptReport) -> StartAttempt | RunResult:
        self._controller.discard_regroup()
        self._end_request.raise_error()
        return await self._coordinator.attempt_ended(report)

    def _attempt_report(self, group: WorkerGroup) -> AttemptReport:
        if self._end_request.signal is not None:
            return AttemptReport(group.number)
        if group.lost_with_fork_server:
            how = f"the fork server was lost: {self._fork_server.lost}; its workers ended with it"
            return AttemptReport(group.number, trouble=how)
        exited = group.failures.clean_exits()
        if not group.workers.failed:
            return AttemptReport(group.number, exited=exited)
        deaths, block = group.failures.explain()
        return AttemptReport(group.number, deaths, block, exited=exited)


def _succeeded(group: WorkerGroup) -> list[int]:
    return [worker.seat.rank for worker in group.workers.values() if worker.code == 0]
