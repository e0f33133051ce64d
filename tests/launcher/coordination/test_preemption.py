"""Preemption in the coordinator: reports of ranks, deaths during it, and their order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.contract.messages import worker_messages
from phalanx.launcher.actions import AcceptLoss, Action, HaltWorkers, StopWorkers
from phalanx.launcher.coordination.coordinator import AttemptReport, RunResult
from phalanx.launcher.coordination.single_node import SingleNodeCoordinator
from phalanx.launcher.runs.root_cause import ProcessFailure
from phalanx.launcher.workers.worker import WorkerFailure
from phalanx.recover.decision import RestartPolicy

SHUTDOWN = SimpleNamespace(checkpoint_timeout=60.0, failure_timeout=1.0, signals=(signal.SIGTERM,))
FAILURE = WorkerFailure(1, "rank 1 failed", "here", 0.0, 1.0, 7)
DEAD = AttemptReport(
    0, [ProcessFailure(rank=1, code=3, time=0.0, stopped=False, device="", error="", stderr=[], memory="")], "block"
)


class Agent:
    """Records the actions that it is to perform."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def perform(self, action: Action) -> None:
        self.actions.append(action)

    def note(self, text: str, *, repeats: bool = False) -> None:
        pass

    def event(self, event: object) -> None:
        pass


def among(
    scenario: Callable[[SingleNodeCoordinator, Agent], Coroutine[Any, Any, None]], most: int | None = None
) -> None:
    async def main() -> None:
        plan = SimpleNamespace(
            shutdown=SHUTDOWN,
            environ={"PHALANX_CHECKPOINTS": "/kept"},
            recovery=SimpleNamespace(policy=RestartPolicy(most)),
            group=SimpleNamespace(world_size=2),
        )
        agent = Agent()
        alone: Any = SingleNodeCoordinator(plan, agent, None)  # type: ignore[arg-type]
        alone.attach(agent)
        alone.regroup_ready(True, False, True)
        await scenario(alone, agent)

    asyncio.run(main())


def test_all_have_to_say_where_they_stand() -> None:
    async def scenario(alone: SingleNodeCoordinator, agent: Agent) -> None:
        assert alone.preempt(signal.SIGTERM)
        alone.halt_message(0, worker_messages.HaltAck(7, 0))
        alone.halt_message(0, worker_messages.HaltAck(7, 0))
        assert agent.actions == [HaltWorkers(None)]
        alone.halt_message(1, worker_messages.HaltAck(8, 0))
        assert agent.actions == [HaltWorkers(None), HaltWorkers(9)]

    among(scenario)


@pytest.mark.parametrize("last", [True, False])
def test_a_death_after_the_checkpoint_is_no_fault(last: bool) -> None:
    """Otherwise the run would wait for the last one until the checkpoint timeout."""

    async def scenario(alone: SingleNodeCoordinator, agent: Agent) -> None:
        assert alone.preempt(signal.SIGTERM)
        alone.halt_message(0, worker_messages.HaltedAt(9))
        assert alone.worker_failed(FAILURE) == AcceptLoss()
        assert agent.actions == [HaltWorkers(None)]
        trouble = "" if last else "the fork server was lost"
        found = await alone.attempt_ended(AttemptReport(0, DEAD.deaths, "block", trouble))
        assert isinstance(found, RunResult)
        assert found.code == os.EX_TEMPFAIL

    among(scenario)


@pytest.mark.parametrize("preempted", [True, False])
def test_a_preempted_run_is_not_restarted(preempted: bool) -> None:
    async def scenario(alone: SingleNodeCoordinator, agent: Agent) -> None:
        assert not preempted or alone.preempt(signal.SIGTERM)
        alone.regroup_ready(True, True, True)  # one has finished: no group can form any more
        assert alone.worker_failed(FAILURE) == StopWorkers(signal.SIGTERM, FAILURE.reason, SHUTDOWN.failure_timeout)
        assert alone.is_last_attempt(failed=True) is preempted
        assert isinstance(await alone.attempt_ended(DEAD), RunResult) is preempted

    among(scenario, most=3)
