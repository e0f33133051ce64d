"""Handles workers that timed out waiting for another rank: queries the other ranks before they are stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.launcher.runs import root_cause
from phalanx.launcher.workers.context import Blame

if TYPE_CHECKING:
    from phalanx.launcher.workers.failures import Failures
    from phalanx.launcher.workers.worker import Worker
    from phalanx.launcher.workers.workers import Workers

logger = logging.getLogger(__name__)

_LIMIT = 5.0  # seconds to find the cause


class TimeoutVictims:
    """The workers of one attempt that timed out.

    `on_explained` is called with all of them, once the cause is known or cannot be found.
    """

    def __init__(
        self, all_workers: Workers, failures: Failures, ask: Blame | None, on_explained: Callable[[list[Worker]], None]
    ) -> None:
        self._all_workers = all_workers
        self._failures = failures
        self._ask = ask
        self._on_explained = on_explained
        self._victims: list[Worker] = []
        self._asking: asyncio.Task[None] | None = None

    @property
    def asking(self) -> bool:
        """Return whether the cause is being determined."""
        return self._asking is not None

    def take(self, worker: Worker) -> bool:
        """Handle a worker that has failed. False: it did not time out. Otherwise `on_explained` gets it later."""
        victim = self._timed_out(self._failures.process_failure(worker))
        if victim is None or self._ask is None:
            return False
        self._victims.append(worker)
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._blame(victim, self._ask))
        return True

    def cancel(self) -> None:
        """Stop determining the cause."""
        if self._asking is not None:
            self._asking.cancel()

    def _timed_out(self, death: root_cause.ProcessFailure) -> root_cause.ProcessFailure | None:
        """Return the failure that is a timeout: this one, or another that has closed the connections of this worker."""
        deaths = [death]
        if root_cause.lost_a_peer(death):
            workers = self._all_workers.values()
            deaths += [self._failures.process_failure(worker) for worker in workers if worker.exit.raised is not None]
        return next((each for each in deaths if root_cause.timeout(each) is not None), None)

    async def _blame(self, victim: root_cause.ProcessFailure, ask: Blame) -> None:
        timeout, blame = root_cause.timeout(victim), list[str]()
        try:
            blame = await asyncio.wait_for(ask(victim.rank, timeout), _LIMIT) if timeout is not None else blame
        except Exception:  # an explanation must not hide the failure
            logger.debug("the cause of a timeout of rank %d is unknown", victim.rank, exc_info=True)
        for worker in self._all_workers.values():
            worker.exit.blame = blame if root_cause.timeout(self._failures.process_failure(worker)) is not None else ()
        found, self._victims, self._asking = self._victims, [], None
        self._on_explained(found)
