"""What `phalanx chaos` counts as recovered: a store or fork server only if it was replaced."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.launcher import chaos
from phalanx.launcher.chaos import Chaos, InjectedFault


class Agent:
    """A healthy run of one rank. `react` is called with each signal, and may replace the process."""

    def __init__(self, react: Callable[[Agent], None]) -> None:
        self.notes: list[str] = []
        self.plan = SimpleNamespace(recovery=SimpleNamespace(worker_timeout=0.0), seats=(0,))
        worker = SimpleNamespace(
            seat=SimpleNamespace(rank=0), spare=False, finished=False, pid=os.getpid(), last_heartbeat=1.0
        )
        # A fork server that has ended: a signal to it has no effect.
        self.fork_server = SimpleNamespace(pid=(1 << 22) + 1)
        self.store = SimpleNamespace(pid=5, answers=True)
        self.attempt: Any = SimpleNamespace(
            number=0,
            generation=0,
            stopping=False,
            living=[("0", worker)],
            store=self.store,
            workers=SimpleNamespace(
                values=lambda: [worker],
                formed=lambda _: True,
                send_signal=lambda *_, **__: react(self),
                fork_server=self.fork_server,
            ),
        )
        self._react = react

    def note(self, text: str) -> None:
        self.notes.append(text)
        if "the fork server" in text:
            self._react(self)


def ignored(agent: Agent) -> None:
    """Do not replace the process."""


def replaced(agent: Agent) -> None:
    agent.store.pid += 1
    agent.fork_server = agent.attempt.workers.fork_server = SimpleNamespace(pid=(1 << 22) + 2)


def silent(agent: Agent) -> None:
    """Replace the store by one that does not answer, or the fork server by one that is not ready yet."""
    agent.store.pid, agent.store.answers = 6, False
    agent.fork_server = SimpleNamespace(pid=(1 << 22) + 2)


@pytest.mark.parametrize("kind", [*chaos.OTHERS])
@pytest.mark.parametrize(
    ("react", "text"), [(ignored, "0 recovered, 1 not"), (silent, "0 recovered, 1 not"), (replaced, "all recovered")]
)
def test_a_process_beside_the_ranks(
    kind: str, react: Callable[[Agent], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "_REPLACE_TIMEOUT", 0.1)
    assert f"chaos: 1 fault (1 {kind}), seed 1: {text};" in summary(Agent(react), kind)


def summary(agent: Any, kind: str) -> str:
    """Inject one fault, and return the summary."""
    found = Chaos(seed=1)
    found.recovered += asyncio.run(found._survived(agent, agent.attempt, InjectedFault(0.0, 0, kind)))
    return found.summary(0)


def test_a_store_that_does_not_run_cannot_be_hit() -> None:
    agent = Agent(ignored)
    agent.store.pid = 0
    assert "0 recovered, 1 without any effect" in summary(agent, "store")


def test_the_time_until_the_next_fault_counts_from_the_recovery() -> None:
    """A recovery that takes longer than --kill-every leaves as much training time as a short one."""
    hit: list[float] = []
    healthy: list[float] = []

    def react(agent: Agent) -> None:
        def recover() -> None:
            agent.attempt.generation += 1
            healthy.append(time.monotonic())

        hit.append(time.monotonic())
        asyncio.get_running_loop().call_later(0.4, recover)

    async def disturb() -> None:
        injected = Chaos(seed=1, every=0.2, times=3)
        agent: Any = Agent(react)
        injected.begin(agent)
        async with asyncio.timeout(60):
            while not any("no more faults, 3 of 3 recovered" in note for note in agent.notes):
                await asyncio.sleep(0.01)
        await injected.end(0)

    asyncio.run(disturb())
    pauses = [fault - before for before, fault in zip(healthy, hit[1:], strict=False)]
    assert len(pauses) == 2
    assert min(pauses) >= 0.1
