"""The calls of a group that have started: kept until they have finished, and awaited when the group closes."""

from __future__ import annotations

import logging
import time
from collections import deque
from datetime import timedelta

from .work import FutureCompleter, StartedWork

logger = logging.getLogger(__name__)

_SHUTDOWN_WAIT = 2.0  # seconds that `close` waits for calls that have not finished
_MAX_MESSAGES = 64  # open messages before finished ones are dropped


class OpenWorks:
    """Collectives and messages that have started, and the batch that torch coalesces."""

    def __init__(self, completer: FutureCompleter) -> None:
        self._completer = completer
        self._started: deque[StartedWork] = deque()
        self._messages: list[StartedWork] = []
        self.batch: list[StartedWork] | None = None  # calls since `start_batch`

    def add(self, work: StartedWork) -> None:
        """Add collectives that have started; drop earlier ones that have finished."""
        if self.batch is not None:
            self.batch.append(work)
        started = self._started
        while started and started[0].is_completed():
            started.popleft().detach()
        started.append(work)

    def add_message(self, work: StartedWork) -> None:
        """Add a message; drop others that have finished if there are many."""
        if self.batch is not None:
            self.batch.append(work)
        if len(self._messages) >= _MAX_MESSAGES:
            done = [message for message in self._messages if message.is_completed()]
            for message in done:
                message.detach()
            self._messages = [message for message in self._messages if message not in done]
        self._messages.append(work)

    def start_batch(self) -> None:
        """Collect the following calls in a batch."""
        self.batch = []

    def end_batch(self) -> StartedWork:
        """Return one Work for all calls of the batch."""
        works, self.batch = self.batch or [], None
        pendings = [pending for work in works for pending in work.pendings]
        tensors = [tensor for work in works for tensor in work.tensors]

        def after() -> None:
            for work in works:
                work.wait()

        return StartedWork("coalesced calls", pendings, tensors, self._completer, after=after)

    def wait(self) -> None:
        """Wait for all calls."""
        for work in [*self._started, *self._messages]:
            work.wait()

    def close(self) -> None:
        """Store the outcome of all calls, before the engine is closed. Unfinished collectives get a short time to
        finish: otherwise other ranks would report a lost peer.
        """
        deadline = time.monotonic() + _SHUTDOWN_WAIT
        try:
            for work in [*self._started]:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except Exception:  # the calls after one that fails or times out fail, too
            logger.debug("a call failed while the group was closed", exc_info=True)
        for work in [*self._started, *self._messages]:
            work.detach()
