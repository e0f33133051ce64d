"""Injects faults into a run, in a sequence that depends only on the seed.

The time until the next fault counts from the recovery, so that training progresses even if a recovery takes longer than
`every`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from phalanx.launcher.agent.run_hook import HookedAgent
from phalanx.launcher.workers.worker_group import WorkerGroup

SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "abrt": signal.SIGABRT,
    "bus": signal.SIGBUS,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,  # permanent: the rank is replaced after --worker-timeout
}
OTHERS = {  # processes other than workers
    "store": ("the store", signal.SIGKILL),
    "store-stop": ("the store", signal.SIGSTOP),
    "forkserver": ("the fork server", signal.SIGKILL),
    "forkserver-stop": ("the fork server", signal.SIGSTOP),
}
KINDS = (*SIGNALS, *OTHERS)
_OF_STORE = ("store", "store-stop")
_POLL_INTERVAL = 0.02  # seconds between two checks of the run
_EFFECT_TIMEOUT = 30.0  # seconds for a fault to have an effect
_REPLACE_TIMEOUT = 120.0  # seconds for another store or fork server, which imports torch
_CONNECT_TIMEOUT = 60.0  # seconds for a script that may use phalanx.main to connect


@dataclass(frozen=True)
class InjectedFault:
    """One fault of the sequence."""

    delay: float  # seconds after the recovery from the previous fault
    rank: int
    kind: str  # one of KINDS, or several at once: "store+kill"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that happen at once."""
        return tuple(self.kind.split("+"))


def send_signal(pid: int, number: int) -> None:
    """Send a signal. The fork server cannot do it, because it may be hit at the same moment. 0: there is no process."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def faults(seed: int, ranks: Sequence[int], kinds: Sequence[str], every: float) -> Iterator[InjectedFault]:
    """Yield faults without end, the same for the same seed. Pauses are 0.5 to 1.5 times `every`."""
    chance = random.Random(seed)  # noqa: S311
    while True:
        delay = every * chance.uniform(0.5, 1.5)
        yield InjectedFault(delay, chance.choice(ranks), chance.choice(kinds))


@dataclass
class Chaos:
    """Injects faults into a run, as the `RunHook` of its agent."""

    seed: int
    every: float = 5.0
    kinds: Sequence[str] = ("kill",)
    times: int | None = None
    ranks: frozenset[int] | None = None  # only these; None: all of this node
    patient: bool = True  # the script may use phalanx.main: wait until it has connected
    injected: Counter[str] = field(default_factory=Counter)  # by kind
    recovered: int = 0
    without_effect: int = 0  # faults that changed nothing
    plain: bool = False  # no worker has connected: the script does not use phalanx.main
    pids: frozenset[int] = frozenset()
    _task: asyncio.Task[None] | None = None

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        """Do nothing: chaos needs no sockets."""

    def begin(self, agent: HookedAgent) -> None:
        """Start injecting faults."""
        self._task = asyncio.get_running_loop().create_task(self._disturb(agent))

    def hurry(self) -> None:
        """Do nothing: chaos waits for nothing."""

    async def end(self, code: int) -> None:  # noqa: ARG002
        """Stop injecting faults."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _disturb(self, agent: HookedAgent) -> None:
        attempt = await self._until_healthy(agent)
        here = sorted(worker.seat.rank for worker in attempt.workers.values() if not worker.spare)
        ranks = [rank for rank in here if self.ranks is None or rank in self.ranks]
        if not ranks:
            agent.note(f"chaos: rank {min(self.ranks or ())} is not on this node, which has {here}")
            return
        for fault in itertools.islice(faults(self.seed, ranks, self.kinds, self.every), self.times):
            await asyncio.sleep(fault.delay)
            attempt = await self._until_healthy(agent)
            self.recovered += await self._survived(agent, attempt, fault)
        agent.note(f"chaos: no more faults, {self.recovered} of {self.injected.total()} recovered")
        await asyncio.Event().wait()

    async def _survived(self, agent: HookedAgent, attempt: WorkerGroup, fault: InjectedFault) -> bool:
        """Inject a fault, and wait until the run has recovered. False: it has not, or there was nothing to recover."""
        group, fork_server, store = (attempt.number, attempt.generation), agent.fork_server, attempt.store.pid
        kinds = fault.kinds
        if not store:  # another node hosts it, or no rank has used it yet
            kinds = tuple(kind for kind in kinds if kind not in _OF_STORE)
        self._inject(agent, attempt, fault)
        if not kinds:
            self.without_effect += 1
            return False
        others = {kind.partition("-")[0] for kind in kinds if kind in OTHERS}

        def replaced(now: WorkerGroup) -> bool:
            if "store" in others and (now.store.pid in (0, store) or not now.store.answers):
                return False
            if "forkserver" in others and (
                agent.fork_server is fork_server or now.workers.fork_server is not agent.fork_server
            ):
                return False
            return SIGNALS.keys().isdisjoint(kinds) or (now.number, now.generation) != group

        timeout = _REPLACE_TIMEOUT if others else _EFFECT_TIMEOUT
        if await self._becomes(agent, replaced, agent.plan.recovery.worker_timeout + timeout):
            await self._until_healthy(agent)
            return True
        # a script may ignore SIGTERM; a lost store or fork server always has an effect
        self.without_effect += not others
        return False

    def _inject(self, agent: HookedAgent, attempt: WorkerGroup, fault: InjectedFault) -> None:
        self.injected[fault.kind] += 1
        signals = [OTHERS.get(kind) or (f"rank {fault.rank}", SIGNALS[kind]) for kind in fault.kinds]
        what = ", ".join(f"{number.name} to {whom}" for whom, number in signals)
        pids = {f"rank {worker.seat.rank}": worker.pid for _, worker in attempt.living if not worker.spare}
        pids |= {"the store": attempt.store.pid, "the fork server": agent.fork_server.pid}
        agent.note(f"chaos: fault {self.injected.total()}, {what}")
        for whom, number in signals:
            send_signal(pids.get(whom, 0), number)

    async def _becomes(self, agent: HookedAgent, condition: Callable[[WorkerGroup], bool], limit: float) -> bool:
        """Wait for a condition of the current attempt, for `limit` seconds."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if agent.attempt is not None and condition(agent.attempt):
                return True
            await asyncio.sleep(_POLL_INTERVAL)
        return False

    async def _until_healthy(self, agent: HookedAgent) -> WorkerGroup:
        while (attempt := agent.attempt) is None or not self._is_healthy(attempt, len(agent.plan.seats)):
            await asyncio.sleep(_POLL_INTERVAL)
        return attempt

    def _is_healthy(self, attempt: WorkerGroup, ranks: int) -> bool:
        workers = attempt.workers.values()
        full = sum(not worker.spare for _, worker in attempt.living) == ranks
        if attempt.stopping or not full or any(worker.finished or not worker.pid for worker in workers):
            return False
        if any(worker.last_heartbeat for worker in workers):
            self.plain = False
            return attempt.workers.formed(attempt.generation)
        # A plain script does not report its progress: it counts as healthy once it has started.
        if self.patient and time.monotonic() - min(worker.started_at for worker in workers) < _CONNECT_TIMEOUT:
            return False
        self.plain = True
        return True

    def summary(self, code: int) -> str:
        """Return the summary of all faults."""
        count = self.injected.total()
        if not count:
            return f"chaos: no fault; the run ended with exit code {code}"
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.injected.items()))
        open_ = count - self.recovered - self.without_effect
        how = "all recovered" if not open_ and not self.without_effect else f"{self.recovered} recovered"
        how += f", {open_} not" if open_ else ""
        how += f", {self.without_effect} without any effect" if self.without_effect else ""
        text = (
            f"chaos: {count} fault{'s' if count > 1 else ''} ({kinds}), seed {self.seed}: {how}; "
            f"the run ended with exit code {code}"
        )
        if self.plain:
            text += (
                "\n  the script does not use phalanx.main(train), so one death ends all ranks: "
                "--max-restarts N starts them again"
            )
        return text
