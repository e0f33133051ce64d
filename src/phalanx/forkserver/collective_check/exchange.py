"""Exchanges what the ranks of a group are about to call: through shared memory, or the store.

A synchronous call is held back until all ranks have made theirs, so that all report the same. An asynchronous call is
not: the last rank detects the difference before it starts its own.
"""

from __future__ import annotations

import time
from typing import Protocol

from ..board.ledger import CallLedger
from ..signed_store import SignedStore
from . import mismatch
from .mismatch import Side

WAIT = 5.0  # seconds to wait for a rank; a longer wait is a stall, which the hang detector reports
_MISMATCH_WAIT = 0.5  # seconds to wait for the others once two calls differ
_REPORT_WAIT = 1.0  # seconds for the reporting rank to end the run
_SPIN = 0.00002
_KEPT_KEYS = 128  # newest keys in the store, not deleted yet


class CallExchange(Protocol):
    """Exchanges the calls of a group."""

    def compare(self, number: int, mark: int, text: bytes, *, waits: bool) -> list[Side]:
        """Compare a call with those of the other ranks. Empty: no difference."""
        ...

    def wait_for_reporter(self, reporter: int) -> bool:
        """Wait for the rank that reports. Return True if it has ended: the signal that ends this rank is about to
        arrive.
        """
        ...


class SharedMemoryExchange:
    """For groups whose ranks are all on this node."""

    def __init__(self, ledger: CallLedger, mark: int, own: int, slot: int, peers: dict[int, int]) -> None:
        self._ledger = ledger
        self._mark = mark
        self._own = own
        self._slot = slot
        self._peers = peers  # rank -> slot
        self.lane = ledger.open(mark)
        self._lanes: dict[int, int] = {}
        self._late: set[int] = set()  # ranks that once did not arrive: not waited for until they do

    def compare(self, number: int, mark: int, text: bytes, *, waits: bool) -> list[Side]:
        """Compare a call with those of the other ranks."""
        self._ledger.write(self.lane, self._mark, number, mark, text)
        marks = {self._own: mark}
        missing = self._read_all(list(self._peers), number, marks)
        differ = len(set(marks.values())) > 1
        began = now = time.monotonic() if missing else 0.0
        while missing and (waits or differ):
            awaited = [rank for rank in missing if rank not in self._late and self._is_alive(rank)]
            if not awaited:
                break
            if now - began > (_MISMATCH_WAIT if differ else WAIT):
                self._late.update(awaited)
                break
            slot = self._peers[awaited[0]]
            bell = self._ledger.bell(slot)
            missing = self._read_all(missing, number, marks)
            if awaited[0] in missing and now - began > _SPIN:
                self._ledger.sleep(slot, bell, WAIT)
            now = time.monotonic()
            if not differ and len(set(marks.values())) > 1:
                differ, began = True, now
        return self._sides(number, marks, text) if differ else []

    def _read_all(self, ranks: list[int], number: int, marks: dict[int, int]) -> list[int]:
        """Return the ranks that have not arrived. Adds the calls of the others to `marks`."""
        missing = []
        for rank in ranks:
            found = self._read(rank, number)
            if found is None:
                missing.append(rank)
            else:
                self._late.discard(rank)
                if found[0] == number:
                    marks[rank] = found[1]
        return missing

    def _read(self, rank: int, number: int) -> tuple[int, int] | None:
        slot, known = self._peers[rank], self._lanes.get(rank)
        found = self._ledger.read(slot, known, self._mark, number) if known is not None else None
        if found is None:
            lane = self._ledger.lane(slot, self._mark)
            if lane is not None and lane != known:  # it has joined this group, or has moved its lane
                self._lanes[rank] = lane
                found = self._ledger.read(slot, lane, self._mark, number)
        return found

    def _sides(self, number: int, marks: dict[int, int], text: bytes) -> list[Side]:
        texts = {
            rank: self._ledger.text(self._peers[rank], self._lanes[rank], number) for rank in marks if rank != self._own
        }
        return mismatch.sides(marks, {**texts, self._own: text})

    def _is_alive(self, rank: int) -> bool:
        return self._ledger.has_rank(rank, self._peers[rank])

    def wait_for_reporter(self, reporter: int) -> bool:
        """Wait for the rank that reports."""
        end = time.monotonic() + _REPORT_WAIT
        while time.monotonic() < end:
            # the signal that ends this rank is about to arrive, or another group reports
            if not self._is_alive(reporter):
                time.sleep(_MISMATCH_WAIT)
                return True
            time.sleep(0.01)
        return False


class StoreExchange:
    """Through the store: each rank compares with the first that arrived, and does not wait for later ones."""

    def __init__(self, store: SignedStore, mark: int, own: int, place: int, size: int) -> None:
        self._store = store
        self._mark = mark
        self._own = own
        self._place = place
        self._size = size

    def compare(self, number: int, mark: int, text: bytes, *, waits: bool) -> list[Side]:  # noqa: ARG002
        """Compare a call with that of the first rank."""
        own = f"{mark} {self._own} {text.decode(errors='replace')}"
        first = self._store.set_first(self._key(number), own).decode(errors="replace")
        if number > _KEPT_KEYS and number % self._size == self._place:
            self._store.delete_key(self._key(number - _KEPT_KEYS))
        their_mark, rank, first_text = first.split(" ", 2)
        if int(their_mark) == mark or int(rank) == self._own:  # an entry of our own from an earlier group that failed
            return []
        return mismatch.sides(
            {self._own: mark, int(rank): int(their_mark)}, {self._own: text, int(rank): first_text.encode()}
        )

    def _key(self, number: int) -> str:
        return f"phalanx-check-{self._mark}-{number}"

    def wait_for_reporter(self, reporter: int) -> bool:  # noqa: ARG002
        """Return False: the first rank is in the collective, and cannot report."""
        return False
