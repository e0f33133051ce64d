"""The status slot of one worker in a node's shared memory: written by the worker, read by the agent and its peers."""

from __future__ import annotations

import json
import mmap
import struct
from typing import Any, NamedTuple

SIZE = 8192
# idle: the script's own code, which may compute. sleep: it sleeps there, or in a module or optimizer.
PHASES = (
    *("import", "join", "data", "forward", "backward", "collective", "optimizer", "checkpoint", "compile", "idle"),
    "sleep",
)

_STEP = struct.Struct("QQ")  # count; time of the last, in nanoseconds of the monotonic clock
_LOOK = struct.Struct(f"QQQ{len(PHASES)}Q")  # time; count; count with progress; count per phase
RING = 64  # samples that are kept: six seconds
_RING = struct.Struct(f"{RING}Q")  # one sample each: milliseconds << 24 | step & _STEPS << 4 | number of the phase + 1
_STEPS = (1 << 20) - 1
_TEXT = struct.Struct("<II")  # version, odd while it is written; length
_STEP_AT = 0
_LOOK_AT = _STEP_AT + _STEP.size
_AT = _LOOK_AT // 8
_RING_AT = _LOOK_AT + _LOOK.size
_TEXT_AT = _RING_AT + _RING.size
_TEXT_SIZE = SIZE - _TEXT_AT - _TEXT.size


class StatusReading(NamedTuple):
    """The content of a slot. Times are in seconds of `time.monotonic`, which all processes of a host share."""

    step: int
    stepped: float  # time; 0: never
    looked: float  # time of the last sample; 0: the probe has not started
    looks: int
    moves: int  # number of samples that found the main thread at a different place
    phases: dict[str, int]  # samples per phase
    text: dict[str, Any]  # phase, place, batches, groups, call, moved, places; see sampler.py


class SlotLook(NamedTuple):
    """One sample of the ring."""

    time: float  # seconds of `time.monotonic`
    phase: int  # index in PHASES
    step: int


class StatusSlot:
    """Writes a slot."""

    def __init__(self, memory: mmap.mmap | memoryview, slot: int) -> None:
        self._memory = memory
        self._base = slot * SIZE
        # One store per number: `pack_into` writes zeros first and then single bytes, which a reader could see.
        self._numbers = memoryview(memory)[self._base : self._base + _TEXT_AT].cast("Q")
        self._version = 0
        self.steps = 0

    def step(self, count: int, now: int) -> None:
        """Write the number of steps."""
        self.steps = count
        self._numbers[0], self._numbers[1] = count, now

    def look(self, now: int, looks: int, moves: int, phase: int, times: int) -> None:
        """Write a sample. `phase`: its index; `times`: number of samples with this phase. The other counts are
        unchanged.
        """
        numbers = self._numbers
        numbers[_AT], numbers[_AT + 1], numbers[_AT + 2], numbers[_AT + 3 + phase] = now, looks, moves, times
        numbers[_RING_AT // 8 + looks % RING] = now // 1_000_000 << 24 | (self.steps & _STEPS) << 4 | phase + 1

    def write(self, text: dict[str, Any]) -> None:
        """Write the text."""
        body = json.dumps(text, separators=(",", ":")).encode()
        if len(body) > _TEXT_SIZE:
            body = json.dumps({"phase": text["phase"], "cut": True}).encode()
        at = self._base + _TEXT_AT
        self._version += 2
        _TEXT.pack_into(self._memory, at, self._version - 1, len(body))
        self._memory[at + _TEXT.size : at + _TEXT.size + len(body)] = body
        _TEXT.pack_into(self._memory, at, self._version, len(body))


def clear(memory: mmap.mmap | memoryview, slot: int) -> None:
    """Clear a slot for the next worker."""
    memory[slot * SIZE : (slot + 1) * SIZE] = bytes(SIZE)


def read(memory: mmap.mmap | memoryview, slot: int) -> StatusReading:
    """Return the content of a slot."""
    base = slot * SIZE
    step, stepped = _STEP.unpack_from(memory, base + _STEP_AT)
    looked, looks, moves, *phases = _LOOK.unpack_from(memory, base + _LOOK_AT)
    return StatusReading(
        step, stepped / 1e9, looked / 1e9, looks, moves, dict(zip(PHASES, phases, strict=True)), _text(memory, base)
    )


def step(memory: mmap.mmap | memoryview, slot: int) -> int:
    """Return the number of steps."""
    return int(_STEP.unpack_from(memory, slot * SIZE + _STEP_AT)[0])


def looks(memory: mmap.mmap | memoryview, slot: int, since: float) -> list[SlotLook]:
    """Return the samples after `since`, oldest first, as far back as they are kept."""
    base = slot * SIZE
    after = int(since * 1000) << 24 | 0xFFFFFF
    found = sorted(number for number in _RING.unpack_from(memory, base + _RING_AT) if number > after)
    now = step(memory, slot)  # read last: no sample has seen a later step
    return [
        SlotLook((number >> 24) / 1000, (number & 15) - 1, now - (now - (number >> 4) & _STEPS)) for number in found
    ]


def _text(memory: mmap.mmap | memoryview, base: int) -> dict[str, Any]:
    """Return the text; empty if its writer was stopped in the middle."""
    at = base + _TEXT_AT
    for _ in range(8):
        version, length = _TEXT.unpack_from(memory, at)
        body = bytes(memory[at + _TEXT.size : at + _TEXT.size + min(length, _TEXT_SIZE)])
        if version and version % 2 == 0 and _TEXT.unpack_from(memory, at) == (version, length):
            try:
                found = json.loads(body)
            except ValueError:
                continue
            return found if isinstance(found, dict) else {}
    return {}
