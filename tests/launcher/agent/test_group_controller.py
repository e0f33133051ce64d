"""The effects of a coordinator's actions on the workers, before, during and after an attempt."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import LaunchError, PhalanxError
from phalanx.launcher.actions import AcceptLoss, HaltWorkers, HoldWorkers, RegroupPlan, StopWorkers
from phalanx.launcher.agent.group_controller import GroupController
from phalanx.launcher.agent.stopping.end_request import EndRequest

TERM = signal.SIGTERM
STOP = StopWorkers(TERM, "rank 1 failed", 5.0)


class Group:
    """A worker group that records its calls."""

    def __init__(self, *, living: bool = True, stopping: bool = False) -> None:
        self.calls: list[Any] = []
        self.living = [("0", object())] if living else []
        self.stopping = stopping
        self.over = asyncio.Event()
        self.workers = self.failures = self
        self.generation = 0
        self.died = True  # a rank, with the fork server

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **_: self.calls.append((name, *args))

    def fork_server_lost(self) -> bool:
        self.calls.append(("fork_server_lost",))
        return self.died

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class ForkServer:
    """A supervisor whose next fork servers become ready or are killed."""

    def __init__(self, *, lost: str = "", replacements: list[bool | PhalanxError] | None = None) -> None:
        self.lost = lost
        self.client = object()
        self.waits = True
        self.looks = 0
        self._replacements = replacements or []

    def stop_waiting(self) -> None:
        self.waits = False

    def kill_if_stopped(self) -> None:
        self.looks += 1

    def startup_error(self) -> LaunchError:
        return LaunchError("it ended early")

    async def replace(self, plan: Any) -> bool:
        await asyncio.sleep(0)
        ready = self._replacements.pop(0)
        if isinstance(ready, PhalanxError):
            raise ready
        self.lost = "" if ready else "SIGKILL"
        return ready


def plan(generation: int = 1) -> Any:
    ranks: Any = SimpleNamespace(generation=generation)
    return RegroupPlan(generation, "rank 1 failed", ranks, None)


def controller(
    fork_server: ForkServer | None = None,
    group: Group | None = None,
    *,
    signal_received: signal.Signals | None = None,
    failures: list[PhalanxError] | None = None,
) -> Any:
    options: Any = SimpleNamespace(shutdown=SimpleNamespace(stop_timeout=30.0))
    supervisor: Any = fork_server or ForkServer()
    signals: Any = SimpleNamespace(workers_received=lambda _: False)
    fail = (failures if failures is not None else []).append
    made: Any = GroupController(
        options, supervisor, signals, EndRequest(signal_received), note=lambda _: None, fail=fail
    )
    made.group = group
    return made


@pytest.mark.parametrize("action", [HoldWorkers("too few nodes"), HaltWorkers(7)])
def test_workers_that_are_being_stopped_neither_wait_nor_halt(action: Any) -> None:
    group = Group()
    controller(group=group).perform(action)
    assert len(group.calls) == 1
    stopping = Group(stopping=True)
    controller(group=stopping).perform(action)
    ended = Group()
    controller(group=ended, signal_received=TERM).perform(action)
    controller().perform(action)  # between two attempts
    assert stopping.calls == ended.calls == []


def test_workers_are_stopped_once_but_by_every_signal() -> None:
    group = Group()
    here = controller(group=group)
    here.perform(STOP)
    group.stopping = True
    here.perform(STOP)
    assert group.calls == [("stop", TERM, "rank 1 failed", 5.0)]
    here.stop_by_signal(signal.SIGINT)
    assert group.calls[1:] == [("stop", signal.SIGINT, "Ctrl-C", 30.0)]


def test_a_stop_ends_an_attempt_without_workers_and_the_wait_for_a_fork_server() -> None:
    for stop in (lambda one: one.perform(STOP), lambda one: one.stop_by_signal(TERM)):
        fork_server, group = ForkServer(), Group(living=False)
        stop(controller(fork_server, group))
        assert group.over.is_set()
        assert not fork_server.waits


def test_a_loss_is_accepted_until_the_last_worker() -> None:
    group = Group()
    here = controller(group=group)
    here.perform(AcceptLoss())
    assert not group.over.is_set()
    group.living.clear()
    here.perform(AcceptLoss())
    assert group.over.is_set()


def test_a_regroup_changes_the_plan_and_reaches_the_group() -> None:
    group = Group()
    here = controller(group=group)
    here.perform(plan(3))
    assert here.plan.generation == 3
    assert group.names == ["regroup"]
    group.over.set()
    here.perform(plan(4))
    assert here.plan.generation == 3


def test_a_killed_fork_server_is_replaced_until_one_lives_and_the_latest_regroup_counts() -> None:
    async def replaced() -> None:
        fork_server, group = ForkServer(lost="SIGKILL", replacements=[False, True]), Group(living=False)
        here = controller(fork_server, group)
        here.perform(plan(1))
        here.perform(plan(2))
        group.living = [("0", object())]
        await here.settle()
        assert group.names == ["hold", "hold", "use_fork_server", "regroup"]
        assert group.calls[3][1].generation == 2
        assert not group.over.is_set()

    asyncio.run(replaced())


def test_a_fork_server_that_cannot_be_replaced_fails_the_run() -> None:
    async def refused() -> None:
        fork_server = ForkServer(lost="SIGKILL", replacements=[LaunchError("no module")])
        group = Group(living=False)
        failures: list[PhalanxError] = []
        here = controller(fork_server, group, failures=failures)
        here.perform(plan())
        await here.settle()
        assert [error.what for error in failures] == ["no module"]
        assert group.over.is_set()

    asyncio.run(refused())


def test_workers_that_outlive_the_fork_server_continue_while_it_is_replaced() -> None:
    async def replaced() -> None:
        fork_server, group = ForkServer(lost="SIGKILL", replacements=[True]), Group()
        group.died = False
        here = controller(fork_server, group)
        here._next_regroup = plan(0)  # of an earlier failure
        assert here.fork_server_lost() is None
        await here.settle()
        assert group.names == ["fork_server_lost", "use_fork_server"]
        assert not group.over.is_set()

    asyncio.run(replaced())


def test_a_fork_server_that_never_becomes_ready_fails_the_run() -> None:
    async def refused() -> None:
        fork_server, group = ForkServer(lost="SIGKILL", replacements=[False] * 9), Group()
        failures: list[PhalanxError] = []
        here = controller(fork_server, group, failures=failures)
        here.perform(plan())
        await here.settle()
        assert [error.what for error in failures] == ["it ended early"]
        assert len(fork_server._replacements) == 6

    asyncio.run(refused())


def test_a_stopped_fork_server_is_looked_for_before_it_is_needed() -> None:
    fork_server = ForkServer()
    controller(fork_server, Group()).perform(plan(1))
    assert fork_server.looks == 1
    here = controller(fork_server, Group())
    here.stop_by_signal(signal.SIGINT)
    here.kill()
    assert fork_server.looks == 3


def test_the_loss_of_the_fork_server_is_a_failure_unless_the_attempt_is_over() -> None:
    assert controller().fork_server_lost() is None
    group = Group(living=False)
    here = controller(group=group)
    here.fork_server_lost()
    assert group.names == ["fork_server_lost", "of_all"]
    group.over.set()
    here.fork_server_lost()
    assert group.names[2:] == ["fork_server_lost"]
