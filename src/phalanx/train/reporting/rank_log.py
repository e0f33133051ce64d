"""Values that ranks other than 0 log: they are sent to rank 0 through the store, without waiting.

A rank posts logged values at once; rank 0 reads them when it writes its own metrics, about once per second. The store
outlives ranks, and the keys are the same in all generations of the group: values that a rank posted before it died are
read by rank 0 of the next generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from phalanx.train.reporting.metrics import WriteBudget

logger = logging.getLogger(__name__)

_MOST_ROWS = 1000  # rows per post: more are dropped
_MOST_POSTS = 256  # posts that rank 0 reads at a time
_LONGEST = 1 << 20  # bytes of a post
_FAREWELL = 5.0  # seconds that rank 0 waits for the last posts
_POSTED, _TAKEN, _ENDED = "log/posted", "log/taken", "log/ended"


class LogStore(Protocol):
    """The store of the run, as far as this needs it."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Return a value."""
        ...

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a number, and return the sum."""
        ...

    def check(self, *keys: str) -> bool:
        """Return whether all keys are set."""
        ...

    def delete(self, key: str) -> bool:
        """Delete a key."""
        ...


class LoggedRow(msgspec.Struct, frozen=True, array_like=True):
    """The values of one call of `run.log`."""

    step: int
    epoch: int
    time: float
    values: dict[str, float]
    rank: int = 0
    generation: int = 0  # of the group in which it was logged


_decoder: msgspec.msgpack.Decoder[list[LoggedRow]] = msgspec.msgpack.Decoder(list[LoggedRow])


class RankLog:
    """One rank's end of the log. If the store is lost, logged values are dropped until the group forms again.

    The store is not queried again in that case: torch prints a page of C++ frames each time. `group_store` has the keys
    of this generation only; None: `store` has no other.
    """

    def __init__(
        self,
        store: LogStore,
        rank: int,
        world_size: int,
        *,
        generation: int = 0,
        group_store: LogStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = generation
        self._store = store
        self._group_store = store if group_store is None else group_store
        self._rank = rank
        self._others = world_size - 1
        self._clock = clock
        self._waiting: list[LoggedRow] = []
        self._budget = WriteBudget(burst=20, rate=50, clock=clock)
        self._taken: int | None = None  # None: unknown, because rank 0 of another generation may have taken some
        self._late: list[int] = []  # numbers of posts that were announced and had not arrived
        self._lost = False  # the store has ended

    # -- on other ranks

    def add(self, row: LoggedRow) -> None:
        """Post a row: at once, or with the next ones if there are very many."""
        if len(self._waiting) < _MOST_ROWS:
            self._waiting.append(row)
        self.post()

    def post(self, *, now: bool = False) -> None:
        """Post the waiting rows, if the rate limit or `now` allows it."""
        if not self._waiting or not (now or self._budget.allows()):
            return
        rows, self._waiting = self._waiting, []
        body = msgspec.msgpack.encode(rows)
        if self._lost:
            return
        if len(body) > _LONGEST:
            logger.debug("rank %d has logged %d bytes at once, which are dropped", self._rank, len(body))
            return
        try:
            self._store.set(f"log/{self._store.add(_POSTED)}", body)
        except RuntimeError:  # raised by torch if the store has ended
            self._lose("posting what was logged")

    def end(self) -> None:
        """Post all rows, and mark them as the last."""
        self.post(now=True)
        if self._lost:
            return
        try:
            self._group_store.add(_ENDED)
        except RuntimeError:
            self._lose("posting the last of what was logged")

    def _lose(self, doing: str) -> None:
        self._lost = True
        logger.debug("the store was lost while %s", doing, exc_info=True)

    # -- on rank 0

    def take(self) -> list[LoggedRow]:
        """Return the rows that other ranks have posted since the last call, or since rank 0 of another generation read
        them.
        """
        if not self._others or self._lost:
            return []
        found: list[LoggedRow] = []
        try:
            if self._taken is None:
                self._taken = self._store.add(_TAKEN, 0)
            posted = min(self._store.add(_POSTED, 0), self._taken + _MOST_POSTS)
            numbers, self._late = [*self._late, *range(self._taken + 1, posted + 1)], []
            if posted > self._taken:
                self._store.add(_TAKEN, posted - self._taken)
                self._taken = posted
            for number in numbers:
                key = f"log/{number}"
                if not self._store.check(key):
                    self._late.append(number)
                    continue
                found += _rows(self._store.get(key))
                self._store.delete(key)
        except RuntimeError:
            self._lose("taking what other ranks have logged")
        return found

    def take_last(self) -> list[LoggedRow]:
        """Return the rest, when all other ranks have posted their last rows, or after a few seconds."""
        end = self._clock() + _FAREWELL
        try:
            while not self._lost and self._group_store.add(_ENDED, 0) < self._others and self._clock() < end:
                time.sleep(0.002)
        except RuntimeError:
            self._lose("waiting for the last metrics of other ranks")
        found: list[LoggedRow] = []
        while more := self.take():
            found += more
        return found


def _rows(body: bytes) -> list[LoggedRow]:
    """Decode a post. Invalid data is dropped: it is only about metrics."""
    try:
        return _decoder.decode(body) if len(body) <= _LONGEST else []
    except msgspec.MsgspecError:
        logger.debug("what another rank has logged cannot be read", exc_info=True)
        return []
