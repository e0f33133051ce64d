"""Where a running supervisor is asked things from another terminal: `phalanx why`, `phalanx attach`.

An address that is no file, for the same user alone: the kernel says who calls, and whom one has reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable

from phalanx.errors import LaunchError
from phalanx.launch.runfolder import RunRecord
from phalanx.launch.zygote import kernel, wire

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SOON = 3.0  # seconds for whoever answers to be there
_PATIENCE = 5.0  # seconds for a caller to say what it wants

# What it wants and the connection itself, which is the answerer's from then on.
Answerer = Callable[[wire.Message, socket.socket], Awaitable[None]]


def _name(pid: int, started: int) -> str:
    return f"\0phalanx-desk-{pid}-{started}"


def _peer(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class Desk:
    def __init__(self) -> None:
        self._answerers: dict[str, Answerer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(_name(os.getpid(), kernel.start_time(os.getpid()) or 0))
        self._listener.listen(16)
        self._loop.add_reader(self._listener.fileno(), self._called)

    def answers(self, what: str, answerer: Answerer) -> None:
        self._answerers[what] = answerer

    def _called(self) -> None:
        with contextlib.suppress(BlockingIOError):
            caller, _ = self._listener.accept()
            if _peer(caller)[1] != os.getuid():
                caller.close()
                return
            task = self._loop.create_task(self._serve(caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answerer(self, what: str) -> Answerer | None:
        """Some come only a moment after the ranks."""
        end = self._loop.time() + _SOON
        while what not in self._answerers and self._loop.time() < end:
            await asyncio.sleep(0.1)
        return self._answerers.get(what)

    async def _serve(self, caller: socket.socket) -> None:
        caller.settimeout(_PATIENCE)
        with contextlib.suppress(OSError, ValueError):
            received = await asyncio.to_thread(wire.receive, caller)
            answerer = await self._answerer(received[0].get("ask", "")) if received is not None else None
            if received is not None and answerer is not None:
                caller.settimeout(None)
                await answerer(received[0], caller)
                return
            wire.send(
                caller,
                {
                    "is": "refused",
                    "why": "none of its ranks has begun, or it knows no such question",
                },
            )
        caller.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()


def call(run: RunRecord, question: wire.Message) -> socket.socket:
    """The supervisor of a run on this machine, asked."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(_name(run.pid, run.pid_started))
        if _peer(sock) != (run.pid, os.getuid()):
            raise OSError("somebody else answers there")
        wire.send(sock, question)
    except OSError as error:
        sock.close()
        raise LaunchError(
            f"{run.id} cannot be asked: {error.strerror or error}",
            details=[f"its supervisor is process {run.pid} on {run.host or 'this machine'}"],
            fix="phalanx ps shows what runs here",
        ) from None
    return sock
