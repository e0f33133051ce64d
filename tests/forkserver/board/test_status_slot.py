"""The status slot: written by a worker, read by its agent at any time."""

from __future__ import annotations

import mmap
import os
import signal

from phalanx.forkserver.board import status_slot
from phalanx.forkserver.board.status_slot import PHASES, SlotLook
from phalanx.launcher.workers.probes import StatusBoard


def test_a_slot_keeps_the_newest_samples() -> None:
    memory = memoryview(bytearray(2 * status_slot.SIZE))
    own = status_slot.StatusSlot(memory, 1)
    assert status_slot.looks(memory, 1, 0.0) == []
    for number in range(1, 201):
        own.step((1 << 20) + number // 10, 1)  # more than the slot stores
        own.look(number * 100_000_000, number, 0, number % len(PHASES), number)
    found = status_slot.looks(memory, 1, 0.0)
    assert len(found) == status_slot.RING
    assert found[-1] == SlotLook(20.0, 200 % len(PHASES), (1 << 20) + 20)
    assert found[0] == SlotLook(13.7, 137 % len(PHASES), (1 << 20) + 13)
    assert [one.time for one in status_slot.looks(memory, 1, 19.8)] == [19.9, 20.0]
    assert status_slot.looks(memory, 0, 0.0) == []
    assert status_slot.read(memory, 1).phases["idle"] == max(
        n for n in range(201) if n % len(PHASES) == PHASES.index("idle")
    )


def test_looks_are_never_read_half_written() -> None:
    """The reader and the writer are different processes."""
    board = StatusBoard()
    slot = board.allocate()
    assert slot is not None
    child = os.fork()
    if not child:
        own, now = status_slot.StatusSlot(board.memory, slot), 0
        while True:
            now += 255_000_000
            own.step(now, now)
            own.look(now, now // 255_000_000, 0, now % 10, 1)
    try:
        seen: list[SlotLook] = []
        while len(seen) < 20_000:
            seen += status_slot.looks(board.memory, slot, 0.0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        board.close()
    assert {round(one.time * 1000) % 255 for one in seen} == {0}


def test_numbers_are_never_read_half_written() -> None:
    memory = mmap.mmap(-1, status_slot.SIZE)
    own = status_slot.StatusSlot(memory, 0)
    own.step(2**40, 2**40)
    child = os.fork()
    while not child:
        own.step(2**40 + 255, 2**40)
        own.step(2**40, 2**40 + 255)
    try:
        found = {status_slot.read(memory, 0).step for _ in range(30000)}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found <= {2**40, 2**40 + 255}


def test_a_half_written_slot_has_no_text() -> None:
    memory = memoryview(bytearray(2 * status_slot.SIZE))
    own = status_slot.StatusSlot(memory, 1)
    own.write({"phase": "data", "place": ["x" * status_slot.SIZE, 1, "f"]})
    assert status_slot.read(memory, 1).text == {"phase": "data", "cut": True}
    own.write({"phase": "idle"})
    status_slot._TEXT.pack_into(memory, status_slot.SIZE + status_slot._TEXT_AT, 5, 16)
    assert status_slot.read(memory, 1).text == {}
    assert status_slot.read(memory, 0).looks == 0
