"""What the ranks of a node are about to call, in the shared memory behind their pages: compared before it is called.

A rank has a lane for each group and a record for each of the last collectives there. Only it writes them; who sits
where is the agent's to write.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time

from ..probe import status_slot

LANES = 32  # groups that one rank has in use at a time
DEPTH = 32  # collectives that it may be ahead of the others and still be compared with

Memory = mmap.mmap | memoryview

_SEAT = struct.Struct("<Q")  # its rank and one more; 0: nobody lives here
_LANES = struct.Struct(f"<{LANES}Q")  # which group each lane is for; 0: none
_BELL_AT = _SEAT.size + _LANES.size  # changes with every record, and wakes who waits for one
_HEAD = struct.Struct("<QQQH")  # number and fingerprint of the call, both and the group mixed; how long the text is
_RECORD = 512
_ROOM = _RECORD - _HEAD.size
_RECORDS_AT = 512
REGION = 4096 * -(-(_RECORDS_AT + LANES * DEPTH * _RECORD) // 4096)


_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_LONGEST_NAP = 0.1  # who died, and signals, are looked for in between
_libc = ctypes.CDLL(None)  # calls let go of Python's lock


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def size(slots: int) -> int:
    """Of a board with so many pages and ledgers. What nobody writes costs nothing."""
    return slots * (status_slot.SIZE + REGION)


def kept(memory: Memory) -> bool:
    """Whether this board has ledgers: ranks are to compare what they call."""
    return len(memory) % (status_slot.SIZE + REGION) == 0


def _base(memory: Memory, slot: int) -> int:
    return len(memory) // (status_slot.SIZE + REGION) * status_slot.SIZE + slot * REGION


def seat(memory: Memory, slot: int, rank: int | None) -> None:
    """By the agent: who sits there from now on; None: nobody that one could wait for."""
    _SEAT.pack_into(memory, _base(memory, slot), 0 if rank is None else rank + 1)


def clear(memory: Memory, slot: int) -> None:
    """Records of an earlier worker are of no group that anybody asks for."""
    base = _base(memory, slot)
    memory[base : base + _RECORDS_AT] = bytes(_RECORDS_AT)


class CallLedger:
    """One rank's view: its own lanes, and everybody's."""

    def __init__(self, memory: Memory, slot: int) -> None:
        self._memory = memory
        self._slots = len(memory) // (status_slot.SIZE + REGION)
        self._own = _base(memory, slot)
        self._next = 0
        self._taken: set[int] = set()
        self._pid = os.getpid()
        self._bell = self._bell_of(slot)
        self._bells: dict[int, ctypes.c_uint32] = {}

    def seats(self) -> dict[int, int]:
        """Rank -> slot, of all who live on this node."""
        found = {}
        for slot in range(self._slots):
            (rank,) = _SEAT.unpack_from(self._memory, _base(self._memory, slot))
            if rank:
                found[rank - 1] = slot
        return found

    def sits(self, rank: int, slot: int) -> bool:
        return bool(_SEAT.unpack_from(self._memory, _base(self._memory, slot))[0] == rank + 1)

    def open(self, group: int) -> int:
        """A lane for a group, rather not one that was given back just now: somebody may still read there. Raises
        LookupError where there is none."""
        lanes = [(self._next + more) % LANES for more in range(LANES)]
        lane = next((lane for lane in lanes if lane not in self._taken), None)
        if lane is None:
            raise LookupError("all lanes are taken")
        self._next = lane + 1
        self._taken.add(lane)
        self._name(lane, group)
        return lane

    def close(self, lane: int) -> None:
        """The group is gone."""
        if os.getpid() == self._pid:  # not in a child of the worker
            self._taken.discard(lane)
            self._name(lane, 0)

    def _name(self, lane: int, group: int) -> None:
        struct.pack_into("<Q", self._memory, self._own + _SEAT.size + 8 * lane, group)

    def lane(self, slot: int, group: int) -> int | None:
        """Which lane another rank has for the group; None: it has not come to it."""
        lanes = _LANES.unpack_from(self._memory, _base(self._memory, slot) + _SEAT.size)
        return lanes.index(group) if group in lanes else None

    def write(self, lane: int, group: int, number: int, fingerprint: int, text: bytes) -> None:
        at = self._own + _RECORDS_AT + (lane * DEPTH + number % DEPTH) * _RECORD
        text = text[:_ROOM]
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        # Half of it, or one of another group, does not fit together, and counts as not yet there.
        _HEAD.pack_into(self._memory, at, number, fingerprint, number ^ fingerprint ^ group, len(text))
        self._bell.value += 1
        if _FUTEX is not None:
            _libc.syscall(_FUTEX, ctypes.byref(self._bell), _WAKE, _EVERYBODY, None, None, 0)

    def bell(self, slot: int) -> int:
        if slot not in self._bells:
            self._bells[slot] = self._bell_of(slot)
        return self._bells[slot].value

    def sleep(self, slot: int, bell: int, limit: float) -> None:
        """Until that rank writes something, if its bell is still as it was."""
        limit = min(limit, _LONGEST_NAP)
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
        """The number and fingerprint where this one would be; a later number: it is overwritten. None: not there."""
        at = _base(self._memory, slot) + _RECORDS_AT + (lane * DEPTH + number % DEPTH) * _RECORD
        found, fingerprint, mixed, _ = _HEAD.unpack_from(self._memory, at)
        if found < number or mixed != found ^ fingerprint ^ group:
            return None
        return found, fingerprint

    def text(self, slot: int, lane: int, number: int) -> bytes:
        at = _base(self._memory, slot) + _RECORDS_AT + (lane * DEPTH + number % DEPTH) * _RECORD
        length = _HEAD.unpack_from(self._memory, at)[3]
        return bytes(self._memory[at + _HEAD.size : at + _HEAD.size + min(length, _ROOM)])
