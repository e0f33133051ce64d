"""How the ranks of a group see what the others are about to call: by shared memory, or by the store.

One whose caller waits for it is held back until all ranks have come to it, so that all can say the same. An async one
is not: whoever comes last to it sees the difference, and has not started it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from . import mismatch
from .ledger import CallLedger
from .mismatch import Side

WAIT = 5.0  # seconds for a rank that does not come: then it is a stall, which is for others to tell
_REST = 0.5  # the same, once two differ
_HOLD = 1.0  # for the one rank that tells it to end the run
_SPIN = 0.00002
_KEPT = 128  # newest keys in the store that are not deleted yet


class CallExchange(Protocol):
    """How the ranks of a group see what the others call."""

    def compare(self, number: int, mark: int, text: bytes, *, waits: bool) -> list[Side]:
        """Empty: all that is known is the same."""
        ...

    def hold(self, loud: int) -> bool:
        """Leave the word to one rank. True: it has ended, and what it meant for us is on its way."""
        ...


class SharedMemoryExchange:
    """All ranks of the group are on this node: through shared memory."""

    def __init__(self, ledger: CallLedger, mark: int, own: int, slot: int, peers: dict[int, int]) -> None:
        self._ledger = ledger
        self._mark = mark
        self._own = own
        self._slot = slot
        self._peers = peers  # rank -> slot
        self.lane = ledger.open(mark)
        self._lanes: dict[int, int] = {}
        self._late: set[int] = set()  # who did not come, once: not waited for until it has

    def compare(self, number: int, mark: int, text: bytes, *, waits: bool) -> list[Side]:
        self._ledger.write(self.lane, self._mark, number, mark, text)
        marks = {self._own: mark}
        missing = self._look(list(self._peers), number, marks)
        differ = len(set(marks.values())) > 1
        began = now = time.monotonic() if missing else 0.0
        while missing and (waits or differ):
            awaited = [rank for rank in missing if rank not in self._late and self._sits(rank)]
            if not awaited:
                break
            if now - began > (_REST if differ else WAIT):
                self._late.update(awaited)
                break
            slot = self._peers[awaited[0]]
            bell = self._ledger.bell(slot)
            missing = self._look(missing, number, marks)
            if awaited[0] in missing and now - began > _SPIN:
                self._ledger.sleep(slot, bell, WAIT)
            now = time.monotonic()
            if not differ and len(set(marks.values())) > 1:
                differ, began = True, now
        return self._sides(number, marks, text) if differ else []

    def _look(self, ranks: list[int], number: int, marks: dict[int, int]) -> list[int]:
        """Who has not come yet. What the others call goes to `marks`."""
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
            if lane is not None and lane != known:  # it has come to this group, or has had to move it
                self._lanes[rank] = lane
                found = self._ledger.read(slot, lane, self._mark, number)
        return found

    def _sides(self, number: int, marks: dict[int, int], text: bytes) -> list[Side]:
        texts = {
            rank: self._ledger.text(self._peers[rank], self._lanes[rank], number) for rank in marks if rank != self._own
        }
        return mismatch.sides(marks, {**texts, self._own: text})

    def _sits(self, rank: int) -> bool:
        return self._ledger.sits(rank, self._peers[rank])

    def hold(self, loud: int) -> bool:
        end = time.monotonic() + _HOLD
        while time.monotonic() < end:
            if not self._sits(loud):  # the signal that ends us is on its way, or another group is
                time.sleep(_REST)
                return True
            time.sleep(0.01)
        return False


class StoreExchange:
    """Through the store: each compares with the first who came, and nobody waits for those who come later."""

    def __init__(self, store: Any, mark: int, own: int, place: int, size: int) -> None:
        self._store = store
        self._mark = mark
        self._own = own
        self._place = place
        self._size = size

    def compare(self, number: int, mark: int, text: bytes, *, waits: bool) -> list[Side]:  # noqa: ARG002
        ours = f"{mark} {self._own} {text.decode(errors='replace')}"
        first = self._store.compare_set(self._key(number), "", ours).decode(errors="replace")
        if number > _KEPT and number % self._size == self._place:
            self._store.delete_key(self._key(number - _KEPT))
        their_mark, rank, said = first.split(" ", 2)
        if int(their_mark) == mark or int(rank) == self._own:  # our own: of a group before, that came to nothing
            return []
        return mismatch.sides(
            {self._own: mark, int(rank): int(their_mark)}, {self._own: text, int(rank): said.encode()}
        )

    def _key(self, number: int) -> str:
        return f"phalanx-check-{self._mark}-{number}"

    def hold(self, loud: int) -> bool:  # noqa: ARG002
        """The first is in the collective, and cannot say anything."""
        return False
