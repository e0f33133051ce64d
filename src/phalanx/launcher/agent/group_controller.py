"""Control of the worker group of the current attempt: starting it, and the actions of the coordinator."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from phalanx.errors import PhalanxError
from phalanx.forkserver import linux, wire
from phalanx.launcher.actions import (
    AcceptLoss,
    HaltWorkers,
    HoldWorkers,
    RefuseRegroup,
    RegroupPlan,
    SignalWorkers,
    StartAttempt,
    StopWorkers,
)
from phalanx.launcher.agent.stopping.end_request import EndRequest
from phalanx.launcher.agent.stopping.signals import Signals
from phalanx.launcher.forking.supervisor import ForkServerSupervisor
from phalanx.launcher.plan import Plan
from phalanx.launcher.workers.context import WorkerGroupContext
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.launcher.workers.worker_group import WorkerGroup

logger = logging.getLogger(__name__)
GroupAction = RegroupPlan | StopWorkers | HoldWorkers | RefuseRegroup | HaltWorkers | AcceptLoss | SignalWorkers

_MOST_RANKS = 8  # in a message
_MOST_FAILED = 3  # consecutive fork servers that never become ready


class GroupController:
    """Performs actions on the workers of the current attempt, and passes them the messages of the fork server.

    `fail` ends the run with an error.
    """

    def __init__(
        self,
        plan: Plan,
        fork_server: ForkServerSupervisor,
        signals: Signals,
        end_request: EndRequest,
        *,
        note: Callable[[str], None],
        fail: Callable[[PhalanxError], None],
    ) -> None:
        self.plan = plan  # ranks change when nodes join or leave
        self.group: WorkerGroup | None = None  # of the current attempt
        self._fork_server = fork_server
        self._signals = signals
        self._end_request = end_request
        self._note = note
        self._fail = fail
        self._early_stop = False  # a stop was requested before the attempt began
        self._next_regroup: RegroupPlan | None = None  # the latest
        # replaces a lost fork server, and the workers that died with it
        self._replacing: asyncio.Task[None] | None = None

    # -- from one attempt to the next

    async def prepare(self, plan: Plan) -> bool:
        """Prepare the next attempt: replace the fork server if it was lost. False if no other becomes ready."""
        self.plan = plan
        return not self._fork_server.lost or await self._fork_server.replace(plan)

    async def start(self, start: StartAttempt, context: WorkerGroupContext) -> WorkerGroup:
        """Start the workers of an attempt."""
        logger.debug("attempt %d: generation %d, %d ranks here", start.attempt, start.generation, len(start.plan.seats))
        group = self.group = WorkerGroup(start, context, self._fork_server.client, self._fork_server.hints)
        for seat in start.plan.seats:
            if self._end_request.made or self._early_stop or group.stopping or group.over.is_set():
                break
            group.start_worker(seat, spare=start.plan.group.spare)
            await asyncio.sleep(0)  # handle messages of the fork server, and signals
        self._early_stop = False
        regroup = self._next_regroup
        if regroup is not None and regroup.generation > start.generation:  # it arrived while this attempt began
            self._regroup(regroup)
        if self._replacing is None:
            self._end_if_empty(group)
        return group

    async def settle(self) -> None:
        """Wait for a replacement of the fork server that has begun, or end it if the attempt does not need it."""
        if self._replacing is not None:
            if self.group is not None and self.group.over.is_set():
                self._fork_server.stop_waiting()
            await asyncio.wait((self._replacing,))

    def discard_regroup(self) -> None:
        """Drop the latest regroup: a later one belongs to the next attempt."""
        self._next_regroup = None

    def release(self) -> None:
        """Drop the group of an attempt that is over."""
        self.group = None

    # -- actions

    def perform(self, action: GroupAction) -> None:
        """Execute an action of the coordinator."""
        match action:
            case RegroupPlan():
                self._regroup(action)
            case StopWorkers():
                self._stop(action)
            case HoldWorkers():
                if (group := self._active_group) is not None:
                    group.hold(action.why)
            case RefuseRegroup():
                if (group := self._active_group) is not None:
                    group.refuse_regroup()
            case HaltWorkers():
                if (group := self._active_group) is not None:
                    group.halt(action.step)
            case AcceptLoss():
                if self.group is not None:
                    self._end_if_empty(self.group)
            case SignalWorkers():
                self.send_signal(action.signal)

    @property
    def _active_group(self) -> WorkerGroup | None:
        """Return the group unless its workers are being stopped."""
        stopping = self._end_request.signal is not None or (self.group is not None and self.group.stopping)
        return None if stopping else self.group

    def _regroup(self, to: RegroupPlan) -> None:
        """Form a new group: replace workers that have died, here or elsewhere."""
        group, self._next_regroup = self.group, to
        if group is None or group.over.is_set():
            return
        self.plan = to.plan
        if self._end_request.signal is not None or group.stopping:
            self._end_if_empty(group)
        elif self._replacing is not None or self._fork_server.lost:
            group.hold(to.why)  # survivors wait, with their state, for the workers of another fork server
            self._replace(group)
        else:
            self._fork_server.kill_if_stopped()  # it would start no worker; once it is lost, the group forms again
            group.regroup(to)

    def _replace(self, group: WorkerGroup) -> None:
        """Replace a lost fork server, unless that has already begun."""
        if self._replacing is None:
            stay = "; its workers continue, and a new one is started"
            go = "; a new one is started"
            self._note(f"the fork server was lost: {self._fork_server.lost}{stay if group.living else go}")
            self._replacing = asyncio.get_running_loop().create_task(self._replace_fork_server(group))

    async def _replace_fork_server(self, group: WorkerGroup) -> None:
        """Start a new fork server, then the workers of this node that the latest regroup needs."""
        failed = 0  # consecutive fork servers that were lost before they were ready
        try:
            while self._fork_server.lost and not group.over.is_set() and not self._end_request.made:
                if not await self._fork_server.replace(self.plan):
                    failed += 1
                    if failed >= _MOST_FAILED and self._fork_server.lost:
                        raise self._fork_server.startup_error()
                elif not group.over.is_set():
                    failed = 0
                    group.use_fork_server(self._fork_server.client)
                    if self._next_regroup is not None and self._next_regroup.generation > group.generation:
                        group.regroup(self._next_regroup)
        except PhalanxError as error:
            self._fail(error)
        finally:
            self._replacing = None
            self._end_if_empty(group)

    def _stop(self, stop: StopWorkers) -> None:
        """Stop the workers of the current attempt, or of the next one before it begins."""
        if self.group is None:
            self._early_stop = True
        elif not self.group.living:
            self._end_empty(self.group)
        elif not self.group.stopping:
            self.group.stop(stop.signal, stop.reason, stop.grace, failed=stop.failed)

    def stop_by_signal(self, number: signal.Signals) -> None:
        """Stop the workers because of a signal, even if they are already being stopped."""
        if self.group is None:
            return
        if not self.group.living:
            self._end_empty(self.group)
            return
        self._fork_server.kill_if_stopped()
        grace = self.plan.shutdown.stop_timeout
        already_sent = self._signals.workers_received(number)
        self.group.stop(
            number, "Ctrl-C" if number == signal.SIGINT else f"{number.name} received", grace, already_sent=already_sent
        )

    def kill(self) -> None:
        """Kill the workers."""
        self._fork_server.kill_if_stopped()
        if self.group is not None:
            self.group.workers.kill()

    def _end_empty(self, group: WorkerGroup) -> None:
        """End an attempt without a live worker."""
        self._fork_server.stop_waiting()  # for a replacement
        group.over.set()

    def _end_if_empty(self, group: WorkerGroup) -> None:
        if not group.living:
            group.over.set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers that handle it. It would kill the others."""
        if self._signals.workers_received(number):
            self._note(f"{number.name} received, by every process of this job")
            return
        received = []
        for name, worker in self.group.living if self.group is not None else ():
            if linux.handles(worker.pid, number) and self.group is not None:
                self.group.workers.send_signal(name, number, alone=True)
                received.append(worker.seat.rank)
        if received:
            ranks = f"rank{'s' if len(received) > 1 else ''} {_rank_list(received)}"
            self._note(f"{number.name} received, and forwarded to {ranks}")
        else:
            self._note(f"{number.name} received; no rank handles it, so it was not forwarded")

    def resize(self) -> None:
        """Pass a new size of the terminal to the workers that have one."""
        if self.group is not None:
            ranks = self.group.output.resized()
            for name, worker in self.group.living:
                if worker.seat.rank in ranks:
                    self.group.workers.send_signal(name, signal.SIGWINCH)

    # -- the fork server

    def fork_server_message(self, message: wire.Message) -> None:
        """Handle a message of the fork server about a process, or about a signal that it received."""
        match message["is"]:
            case "started" if self.group is not None:
                self.group.worker_started(message["name"], message["pid"])
            case "exited" if self.group is not None:
                self.group.worker_exited(message)
            case "refused" if self.group is not None:
                self.group.start_refused(message["name"], message["why"])
            case "signalled":
                self._signals.fork_server_received(message["signal"])

    @property
    def adopted(self) -> frozenset[int]:
        """Return the pids of processes that have outlived their fork server."""
        return self.group.workers.adopted.pids if self.group is not None else frozenset()

    def fork_server_lost(self) -> WorkerFailure | None:
        """Handle the loss of the fork server. Return the failure of the ranks that died with it, if there are any."""
        group = self.group
        if group is None:
            return None
        died = group.fork_server_lost()
        if group.over.is_set():
            return None
        if died or not group.living:
            return group.failures.of_all("the fork server was lost", place="forkserver")
        if not self._end_request.made and not group.stopping:
            self._replace(group)
        return None


def _rank_list(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return ", ".join(map(str, ranks[:_MOST_RANKS])) + more
