"""The calls that the ranks of a node are about to make, in shared memory after their status slots.

A rank has one lane per group, with a record for each of the last collectives. Only the rank itself writes them; the
agent writes which rank has which slot.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time

from . import status_slot

LANES = 32  # groups that a rank can use at a time
DEPTH = 32  # collectives that a rank can be ahead of the others

Memory = mmap.mmap | memoryview

_RANK = struct.Struct("<Q")  # rank plus 1; 0: none
_LANES = struct.Struct(f"<{LANES}Q")  # group of each lane; 0: none
_BELL_AT = _RANK.size + _LANES.size  # changes with every record, and wakes waiting ranks
_HEAD = struct.Struct("<QQQH")  # number and fingerprint of the call, both mixed with the group, length of the text
_RECORD = 512
_TEXT_SIZE = _RECORD - _HEAD.size
_RECORDS_AT = 512
REGION = 4096 * -(-(_RECORDS_AT + LANES * DEPTH * _RECORD) // 4096)


_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_MAX_SLEEP = 0.1  # seconds; dead ranks and signals are checked in between
_libc = ctypes.CDLL(None)  # releases the GIL during calls


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def size(slots: int) -> int:
    """Return the size of a board with this many slots and ledgers. Pages that are never written take no memory."""
    return slots * (status_slot.SIZE + REGION)


def is_enabled(memory: Memory) -> bool:
    """Return whether this board has ledgers, that is, whether ranks compare their calls."""
    return len(memory) % (status_slot.SIZE + REGION) == 0


def _base(memory: Memory, slot: int) -> int:
    return len(memory) // (status_slot.SIZE + REGION) * status_slot.SIZE + slot * REGION


def set_rank(memory: Memory, slot: int, rank: int | None) -> None:
    """Set the rank of a slot; None: none. Called by the agent."""
    _RANK.pack_into(memory, _base(memory, slot), 0 if rank is None else rank + 1)


def clear(memory: Memory, slot: int) -> None:
    """Clear the groups of an earlier worker, to which its records belong."""
    base = _base(memory, slot)
    memory[base : base + _RECORDS_AT] = bytes(_RECORDS_AT)


class CallLedger:
    """The ledger as one rank sees it: its own lanes, and those of all others."""

    def __init__(self, memory: Memory, slot: int) -> None:
        self._memory = memory
        self._slots = len(memory) // (status_slot.SIZE + REGION)
        self._own = _base(memory, slot)
        self._next = 0
        self._taken: set[int] = set()
        self._pid = os.getpid()
        self._bell = self._bell_of(slot)
        self._bells: dict[int, ctypes.c_uint32] = {}

    def slots_by_rank(self) -> dict[int, int]:
        """Return rank -> slot of all ranks on this node."""
        found = {}
        for slot in range(self._slots):
            (rank,) = _RANK.unpack_from(self._memory, _base(self._memory, slot))
            if rank:
                found[rank - 1] = slot
        return found

    def has_rank(self, rank: int, slot: int) -> bool:
        """Return whether this rank still has this slot."""
        return bool(_RANK.unpack_from(self._memory, _base(self._memory, slot))[0] == rank + 1)

    def open(self, group: int) -> int:
        """Return a lane for a group. Avoid a lane that was just released: a rank may still read it. Raises LookupError
        if there is none.
        """
        lanes = [(self._next + more) % LANES for more in range(LANES)]
        lane = next((lane for lane in lanes if lane not in self._taken), None)
        if lane is None:
            raise LookupError("all lanes are taken")
        self._next = lane + 1
        self._taken.add(lane)
        self._name(lane, group)
        return lane

    def close(self, lane: int) -> None:
        """Release the lane of a group that no longer exists."""
        if os.getpid() == self._pid:  # not in a child of the worker
            self._taken.discard(lane)
            self._name(lane, 0)

    def _name(self, lane: int, group: int) -> None:
        struct.pack_into("<Q", self._memory, self._own + _RANK.size + 8 * lane, group)

    def lane(self, slot: int, group: int) -> int | None:
        """Return the lane that another rank has for the group; None: it has not joined it."""
        lanes = _LANES.unpack_from(self._memory, _base(self._memory, slot) + _RANK.size)
        return lanes.index(group) if group in lanes else None

    def write(self, lane: int, group: int, number: int, fingerprint: int, text: bytes) -> None:
        """Write a record, and wake waiting ranks."""
        at = self._own + _RECORDS_AT + (lane * DEPTH + number % DEPTH) * _RECORD
        text = text[:_TEXT_SIZE]
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        # A half-written record, or one of another group, does not match and counts as missing.
        _HEAD.pack_into(self._memory, at, number, fingerprint, number ^ fingerprint ^ group, len(text))
        self._bell.value += 1
        if _FUTEX is not None:
            _libc.syscall(_FUTEX, ctypes.byref(self._bell), _WAKE, _ALL, None, None, 0)

    def bell(self, slot: int) -> int:
        """Return a counter that changes when that rank writes."""
        if slot not in self._bells:
            self._bells[slot] = self._bell_of(slot)
        return self._bells[slot].value

    def sleep(self, slot: int, bell: int, limit: float) -> None:
        """Sleep until that rank writes something, if its bell has not changed."""
        limit = min(limit, _MAX_SLEEP)
        if _FUTEX is None:
            time.sleep(min(limit, 0.0005))
            return
        timeout = _Timespec(0, max(int(limit * 1e9), 1))
        _libc.syscall(
            _FUTEX, ctypes.byref(self._bells[slot]), _WAIT, ctypes.c_uint32(bell), ctypes.byref(timeout), None, 0
        )

    def _bell_of(self, slot: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_buffer(self._memory, _base(self._memory, slot) + _BELL_AT)

    def read(self, slot: int, lane: int, group: int, number: int) -> tuple[int, int] | None:
        """Return number and fingerprint of the record at the position of this call; a later number: overwritten. None:
        missing.
        """
        at = _base(self._memory, slot) + _RECORDS_AT + (lane * DEPTH + number % DEPTH) * _RECORD
        found, fingerprint, mixed, _ = _HEAD.unpack_from(self._memory, at)
        if found < number or mixed != found ^ fingerprint ^ group:
            return None
        return found, fingerprint

    def text(self, slot: int, lane: int, number: int) -> bytes:
        """Return the text of a record."""
        at = _base(self._memory, slot) + _RECORDS_AT + (lane * DEPTH + number % DEPTH) * _RECORD
        length = _HEAD.unpack_from(self._memory, at)[3]
        return bytes(self._memory[at + _HEAD.size : at + _HEAD.size + min(length, _TEXT_SIZE)])
