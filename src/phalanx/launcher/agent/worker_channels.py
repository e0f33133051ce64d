"""Where the workers of a node that can regroup are reached. They call; a plain script never does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from typing import Protocol

import msgspec

from phalanx.contract import worker_messages as words

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class WorkerChannelEvents(Protocol):
    def knows(self, pid: int) -> bool:
        """Whether it is a worker of ours."""
        ...

    def said(self, pid: int, message: words.FromWorker) -> None: ...


class WorkerChannels:
    """An address that is no file: it is gone with this process, however that ends."""

    def __init__(self, ears: WorkerChannelEvents) -> None:
        self._ears = ears
        self._loop = asyncio.get_running_loop()
        self._callers: dict[int, socket.socket] = {}
        self.name = f"phalanx-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64)
        self._loop.add_reader(self._listener.fileno(), self._called)

    @property
    def callers(self) -> frozenset[int]:
        return frozenset(self._callers)

    def send(self, pid: int, message: words.FromAgent) -> None:
        """To one that does not listen any more nothing can be told; that it has died is told by others."""
        caller = self._callers.get(pid)
        if caller is not None:
            with contextlib.suppress(OSError):
                caller.send(words.encode(message))

    def _called(self) -> None:
        with contextlib.suppress(BlockingIOError):
            caller, _ = self._listener.accept()
            pid, uid, _ = _CREDENTIALS.unpack(
                caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid() or not self._ears.knows(pid) or pid in self._callers:
                caller.close()
                return
            caller.setblocking(False)
            self._callers[pid] = caller
            self._loop.add_reader(caller.fileno(), self._heard, pid, caller)

    def drain(self, pid: int) -> None:
        """It has ended: what it had said before is heard first."""
        while (caller := self._callers.get(pid)) is not None and self._heard(pid, caller):
            pass

    def _heard(self, pid: int, caller: socket.socket) -> bool:
        """Whether there was anything."""
        try:
            packet = caller.recv(words.LARGEST)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        message: words.FromWorker | None = None
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            message = words.from_worker(packet) if packet else None
        if message is None:  # gone, or not one of ours after all
            self._hang_up(pid)
        else:
            self._ears.said(pid, message)
        return message is not None

    def _hang_up(self, pid: int) -> None:
        caller = self._callers.pop(pid, None)
        if caller is not None:
            self._loop.remove_reader(caller.fileno())
            caller.close()

    def close(self) -> None:
        for pid in list(self._callers):
            self._hang_up(pid)
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
