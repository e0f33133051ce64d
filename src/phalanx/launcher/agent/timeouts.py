"""Workers that timed out waiting for another rank: before the others are stopped, they are asked where they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from phalanx.diagnose.rules.timeouts import Timeout
from phalanx.launcher.runs import root_cause

if TYPE_CHECKING:
    from phalanx.launcher.agent.worker import Worker, Workers

Blame = Callable[[int, Timeout], Awaitable[list[str]]]  # of a rank that timed out: who made it, in lines

_LIMIT = 5.0  # seconds to find that out


class TimeoutVictims:
    """Of one attempt. `told` is called with all of them, once it is known who is to blame or that nobody can tell."""

    def __init__(self, attempt: Workers, ask: Blame | None, on_explained: Callable[[list[Worker]], None]) -> None:
        self._attempt = attempt
        self._ask = ask
        self._on_explained = on_explained
        self._workers: list[Worker] = []
        self._asking: asyncio.Task[None] | None = None

    @property
    def asking(self) -> bool:
        return self._asking is not None

    def take(self, worker: Worker) -> bool:
        """Whether it is one: then `told` hears of it later."""
        victim = self._timed_out(self._attempt.process_failure(worker))
        if victim is None or self._ask is None:
            return False
        self._workers.append(worker)
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._blame(victim, self._ask))
        return True

    def cancel(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    def _timed_out(self, death: root_cause.ProcessFailure) -> root_cause.ProcessFailure | None:
        """The one that timed out: this one, or another, whose timeout has closed the connections of this one."""
        deaths = [death]
        if root_cause.lost_a_peer(death):
            workers = self._attempt.workers.values()
            deaths += [self._attempt.process_failure(worker) for worker in workers if worker.raised is not None]
        return next((each for each in deaths if root_cause.timeout(each) is not None), None)

    async def _blame(self, victim: root_cause.ProcessFailure, ask: Blame) -> None:
        timeout, blame = root_cause.timeout(victim), list[str]()
        with contextlib.suppress(Exception):  # what only explains a failure must not hide it
            blame = await asyncio.wait_for(ask(victim.rank, timeout), _LIMIT) if timeout is not None else blame
        for worker in self._attempt.workers.values():
            worker.blame = blame if root_cause.timeout(self._attempt.process_failure(worker)) is not None else ()
        found, self._workers, self._asking = self._workers, [], None
        self._on_explained(found)
