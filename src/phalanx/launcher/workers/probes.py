"""The agent's side of the probes: the status board of a node, and a channel to each worker.

The slot of a worker without a probe stays empty: with --no-python, or before its interpreter has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.forkserver import wire
from phalanx.forkserver.board import ledger, status_slot
from phalanx.forkserver.board.status_slot import SlotLook
from phalanx.launcher.ipc.pending_replies import PendingReplies

_SLOTS = 256  # more than a node has workers; unused slots use no memory
_GONE = 2.0  # seconds without a look after which a probe with a closed channel counts as ended


class StatusBoard:
    """The status slots of all workers of a node, in shared memory without a name (memfd)."""

    def __init__(self, *, checks: bool = False) -> None:
        self.checks = checks  # --check-collectives uses it too
        size = ledger.size(_SLOTS) if checks else _SLOTS * status_slot.SIZE
        self.fd = os.memfd_create("phalanx-board", os.MFD_CLOEXEC)
        os.truncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        self._taken: set[int] = set()

    def allocate(self) -> int | None:
        """Return a free slot. None: all are in use."""
        slot = next((slot for slot in range(_SLOTS) if slot not in self._taken), None)
        if slot is not None:
            self._taken.add(slot)
            status_slot.clear(self.memory, slot)
            if self.checks:
                ledger.clear(self.memory, slot)
        return slot

    def set_rank(self, slot: int, rank: int | None) -> None:
        """Set the rank of a slot. None: no other rank waits for it."""
        if self.checks:
            ledger.set_rank(self.memory, slot, rank)

    def release(self, slot: int) -> None:
        """Free a slot."""
        self.set_rank(slot, None)
        self._taken.discard(slot)

    def close(self) -> None:
        """Unmap the memory."""
        self.memory.close()
        os.close(self.fd)


class ProbeClient:
    """The connection to the probe of one worker, and its status slot."""

    def __init__(self, board: StatusBoard, slot: int, on_message: Callable[[wire.Message, list[int]], None]) -> None:
        self._board = board
        self.slot = slot
        self._on_message = on_message  # called with messages that are not answers
        self._channel, self._worker_end = socket.socketpair()
        self._channel.setblocking(False)
        self._reader = wire.MessageReader()
        self.stacks = os.memfd_create("phalanx-stacks", os.MFD_CLOEXEC)
        self._replies: PendingReplies[wire.Message] = PendingReplies()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)

    @property
    def fds(self) -> list[int]:
        """Return the file descriptors for the worker: board, channel, stacks."""
        return [self._board.fd, self._worker_end.fileno(), self.stacks]

    def set_rank(self, rank: int | None) -> None:
        """Set the rank of this worker. None: it is a spare, or has ended."""
        self._board.set_rank(self.slot, rank)

    def handed_over(self) -> None:
        """Close the worker's end of the channel here, after the worker has received it."""
        self._worker_end.close()

    @property
    def status(self) -> status_slot.StatusReading:
        """Return the published status of the probe. Empty if the worker has become another program, without a probe."""
        found = status_slot.read(self._board.memory, self.slot)
        if self._channel.fileno() < 0 and not found.text.get("ending") and time.monotonic() - found.looked > _GONE:
            return found._replace(looked=0.0, text={})
        return found

    @property
    def step(self) -> int:
        """Return the optimizer steps of the status slot, without reading the rest."""
        return status_slot.step(self._board.memory, self.slot)

    def looks(self, since: float) -> list[SlotLook]:
        """Return the looks at the main thread since this time."""
        return status_slot.looks(self._board.memory, self.slot, since)

    async def ask(self, what: str, *, timeout: float, fds: Sequence[int] = (), **more: Any) -> wire.Message | None:
        """Send a request and return the answer.

        None: the interpreter lock is held, the worker is stopped, or it has ended.
        """

        def send(number: int) -> None:
            wire.send(self._channel, {"do": what, "id": number, **more}, list(fds))

        try:
            return await self._replies.request(send, timeout=timeout)
        except (OSError, TimeoutError):
            return None

    def send(self, what: str) -> None:
        """Send a request that has no answer."""
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"do": what, "id": 0})

    def _read(self) -> None:
        """Read the data that has arrived, without waiting for the rest of a message."""
        try:
            while (received := self._reader.receive(self._channel)) is not None:
                message, fds = received
                if not self._replies.resolve(message.get("id", 0), message):
                    self._on_message(message, fds)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            pass
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the channel and fail all open requests."""
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        self._replies.fail_all(BrokenPipeError())

    def close(self) -> None:
        """Close the channel and free the slot."""
        if self._channel.fileno() >= 0:
            self._disconnect()
        self._worker_end.close()
        os.close(self.stacks)
        self.stacks = -1  # a late caller must not use a number that is reused
        self._board.release(self.slot)
