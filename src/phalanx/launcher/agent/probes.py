"""The agent's side of probes: the memory that the workers of a node publish in, and a channel to each.

A worker that is no Python of ours (--no-python, or one that has not come to it yet) has a page that stays empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.forkserver import wire
from phalanx.forkserver.collective_check import ledger
from phalanx.forkserver.probe import status_slot
from phalanx.forkserver.probe.status_slot import SlotLook

_SLOTS = 256  # more workers than a node has; pages that nobody writes cost nothing
_GONE = 2.0  # seconds without a look, where the channel is closed: nobody looks any more


class StatusBoard:
    """Memory without a name (memfd): gone with the last process that uses it."""

    def __init__(self, *, checks: bool = False) -> None:
        self.checks = checks  # whether ranks compare their collectives in it
        size = ledger.size(_SLOTS) if checks else _SLOTS * status_slot.SIZE
        self.fd = os.memfd_create("phalanx-board", os.MFD_CLOEXEC)
        os.truncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        self._taken: set[int] = set()

    def allocate(self) -> int | None:
        """A slot; None: there is none left."""
        slot = next((slot for slot in range(_SLOTS) if slot not in self._taken), None)
        if slot is not None:
            self._taken.add(slot)
            status_slot.clear(self.memory, slot)
            if self.checks:
                ledger.clear(self.memory, slot)
        return slot

    def set_rank(self, slot: int, rank: int | None) -> None:
        """Who sits there; None: nobody that others could wait for."""
        if self.checks:
            ledger.set_rank(self.memory, slot, rank)

    def release(self, slot: int) -> None:
        self.set_rank(slot, None)
        self._taken.discard(slot)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class ProbeClient:
    """Of one worker."""

    def __init__(self, board: StatusBoard, slot: int, on_message: Callable[[wire.Message, list[int]], None]) -> None:
        self._board = board
        self.slot = slot
        self._on_message = on_message  # what it says unasked
        self._channel, self._worker_end = socket.socketpair()
        self._channel.setblocking(False)
        self._reader = wire.MessageReader()
        self.stacks = os.memfd_create("phalanx-stacks", os.MFD_CLOEXEC)
        self._requests: dict[int, asyncio.Future[wire.Message]] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)

    @property
    def fds(self) -> list[int]:
        """What the worker gets: board, channel, stacks."""
        return [self._board.fd, self._worker_end.fileno(), self.stacks]

    def set_rank(self, rank: int | None) -> None:
        self._board.set_rank(self.slot, rank)

    def handed_over(self) -> None:
        """The worker has them, or nobody will."""
        self._worker_end.close()

    @property
    def status(self) -> status_slot.StatusReading:
        """A worker that has become another program has no probe any more: what it has shown is of no use."""
        found = status_slot.read(self._board.memory, self.slot)
        if self._channel.fileno() < 0 and not found.text.get("ending") and time.monotonic() - found.looked > _GONE:
            return found._replace(looked=0.0, text={})
        return found

    @property
    def step(self) -> int:
        """Of its page, and nothing else."""
        return status_slot.step(self._board.memory, self.slot)

    def looks(self, since: float) -> list[SlotLook]:
        return status_slot.looks(self._board.memory, self.slot, since)

    async def ask(self, what: str, *, timeout: float, fds: Sequence[int] = (), **more: Any) -> wire.Message | None:
        """None: it does not reply, for Python's lock is held, it is stopped, or it is gone."""
        number = next(self._numbers)
        reply = self._requests[number] = self._loop.create_future()
        try:
            wire.send(self._channel, {"do": what, "id": number, **more}, list(fds))
            return await asyncio.wait_for(reply, timeout)
        except (OSError, TimeoutError):
            return None
        finally:
            del self._requests[number]

    def send(self, what: str) -> None:
        """What needs no answer."""
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"do": what, "id": 0})

    def _read(self) -> None:
        """What there is: a worker that is stopped in the middle of a sentence must not keep us."""
        try:
            while (received := self._reader.receive(self._channel)) is not None:
                message, fds = received
                request = self._requests.get(message.get("id", 0))
                if request is None:
                    self._on_message(message, fds)
                elif not request.done():
                    request.set_result(message)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            pass
        self._disconnect()

    def _disconnect(self) -> None:
        """It is gone: nobody waits for its answers any more."""
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        for request in self._requests.values():
            if not request.done():
                request.set_exception(BrokenPipeError())

    def close(self) -> None:
        if self._channel.fileno() >= 0:
            self._disconnect()
        self._worker_end.close()
        os.close(self.stacks)
        self.stacks = -1  # somebody may be about to empty it, and the number is another file's soon
        self._board.release(self.slot)
