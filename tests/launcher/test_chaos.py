"""What `phalanx chaos` counts as recovered: a store or fork server only if it was replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cli.options import values
from phalanx.launcher import chaos
from phalanx.launcher.chaos import Chaos, InjectedFault


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the signals that are sent. They reach no process."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(chaos.os, "kill", lambda pid, number: found.append((pid, number)))
    return found


class Agent:
    """A healthy run of one rank. `react` is called at each fault, and may replace the process."""

    def __init__(self, react: Callable[[Agent], None]) -> None:
        self.notes: list[str] = []
        self.plan = SimpleNamespace(recovery=SimpleNamespace(worker_timeout=0.0), seats=(0,))
        worker = SimpleNamespace(
            seat=SimpleNamespace(rank=0), spare=False, finished=False, pid=os.getpid(), last_heartbeat=1.0
        )
        self.fork_server = SimpleNamespace(pid=4)
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
                fork_server=self.fork_server,
            ),
        )
        self._react = react

    def note(self, text: str) -> None:
        self.notes.append(text)
        if text.startswith("chaos: fault "):
            self._react(self)


def ignored(agent: Agent) -> None:
    """Do not replace the process."""


def replaced(agent: Agent) -> None:
    agent.store.pid += 1
    agent.fork_server = agent.attempt.workers.fork_server = SimpleNamespace(pid=7)


def silent(agent: Agent) -> None:
    """Replace the store by one that does not answer, or the fork server by one that is not ready yet."""
    agent.store.pid, agent.store.answers = 6, False
    agent.fork_server = SimpleNamespace(pid=7)


@pytest.mark.parametrize("kind", [*chaos.OTHERS])
@pytest.mark.parametrize(
    ("react", "text"), [(ignored, "0 recovered, 1 not"), (silent, "0 recovered, 1 not"), (replaced, "all recovered")]
)
def test_a_process_beside_the_ranks(
    kind: str, react: Callable[[Agent], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "_REPLACE_TIMEOUT", 0.1)
    assert f"chaos: 1 fault (1 {kind}), seed 1: {text};" in summary(Agent(react), kind)


def store_only(agent: Agent) -> None:
    agent.store.pid += 1


def regrouped(agent: Agent) -> None:
    replaced(agent)
    agent.attempt.generation += 1


@pytest.mark.parametrize(
    ("kind", "react", "text"),
    [
        ("store+forkserver", store_only, "0 recovered, 1 not"),
        ("store+forkserver", replaced, "all recovered"),
        ("store+forkserver+kill", replaced, "0 recovered, 1 not"),  # the dead rank was not replaced
        ("store+forkserver+kill", regrouped, "all recovered"),
    ],
)
def test_all_that_was_hit_at_once_has_to_recover(
    kind: str, react: Callable[[Agent], None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "_REPLACE_TIMEOUT", 0.1)
    agent = Agent(react)
    assert f"chaos: 1 fault (1 {kind}), seed 1: {text};" in summary(agent, kind)
    assert agent.notes[0].startswith("chaos: fault 1, SIGKILL to the store, SIGKILL to the fork server")


def test_each_process_gets_its_signal(signals: list[tuple[int, int]]) -> None:
    summary(Agent(regrouped), "store-stop+forkserver+kill")
    assert signals == [(5, signal.SIGSTOP), (4, signal.SIGKILL), (os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize("kind", ["store", "store-stop"])
def test_a_store_that_ends_has_to_be_replaced(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_REPLACE_TIMEOUT", 0.1)
    ended = Agent(lambda agent: setattr(agent.store, "pid", 0))
    assert f"chaos: 1 fault (1 {kind}), seed 1: 0 recovered, 1 not;" in summary(ended, kind)


def test_each_kind_of_a_combined_fault_is_checked() -> None:
    assert values.faults("kill, store+kill") == ("kill", "store+kill")
    with pytest.raises(ValueError, match='"earthquake" is none of kill, segv'):
        values.faults("store+earthquake")
    with pytest.raises(ValueError, match="a kind is missing"):
        values.faults("store+")


def summary(agent: Any, kind: str) -> str:
    """Inject one fault, and return the summary."""
    found = Chaos(seed=1)
    found.recovered += asyncio.run(found._survived(agent, agent.attempt, InjectedFault(0.0, 0, kind)))
    return found.summary(0)


def test_a_store_that_does_not_run_cannot_be_hit(signals: list[tuple[int, int]]) -> None:
    agent = Agent(ignored)
    agent.store.pid = 0
    for kind in ("store", "store-stop", "store+store-stop"):
        assert "0 recovered, 1 without any effect" in summary(agent, kind)
    assert signals == []  # 0 would be the process group of this process
    assert "all recovered" in summary(agent_without_store(), "store+kill")
    assert signals == [(os.getpid(), signal.SIGKILL)]


def agent_without_store() -> Agent:
    agent = Agent(lambda agent: setattr(agent.attempt, "generation", 1))
    agent.store.pid = 0
    return agent


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
