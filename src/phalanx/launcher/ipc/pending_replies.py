"""Matches replies to requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Reply = TypeVar("Reply")


class PendingReplies(Generic[Reply]):
    """The requests of one channel that wait for their reply. A request has a number, and its reply repeats it.

    `peer`, if a channel has several: a reply counts only if it comes from the peer that was asked.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # 0 is free for messages that are not requests
        self._pending: dict[tuple[Hashable, int], asyncio.Future[Reply]] = {}

    async def request(self, send: Callable[[int], None], *, timeout: float | None, peer: Hashable = None) -> Reply:
        """Call `send` with the number of a new request, and return the reply.

        Raises TimeoutError, exceptions of `send`, and the error of `fail_all`.
        """
        key = (peer, next(self._numbers))
        reply = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            send(key[1])
            return await asyncio.wait_for(reply, timeout)
        finally:
            del self._pending[key]

    def resolve(self, number: int, reply: Reply, *, peer: Hashable = None) -> bool:
        """Pass a reply to its request. Return False if no request waits for it: it is late, or is not a reply."""
        request = self._pending.get((peer, number))
        if request is None:
            return False
        if not request.done():
            request.set_result(reply)
        return True

    def fail_all(self, error: Exception) -> None:
        """Raise an error in all requests, because the channel has ended."""
        for request in self._pending.values():
            if not request.done():
                request.set_exception(error)
