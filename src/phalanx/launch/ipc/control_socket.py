"""Where a running agent is asked things from another terminal: `phalanx why`, `phalanx attach`.

An address that is no file, for whoever is the same user and can read the run folder, where a key lies: another
container may have the same network and the same number for its user. The kernel says who calls, and whom one has
reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from phalanx.errors import LaunchError
from phalanx.forkserver import wire
from phalanx.launch.runs.run_folder import RunFolder, RunRecord

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PATIENCE = 5.0  # seconds for a caller to say what it wants
SOON = 10.0  # seconds for somebody to be there who knows: a run that has only just begun
_LONGEST = 1 << 16  # bytes of that
_STRANGERS = 32  # who have not said it yet: of more than that, the first is hung up on
_FILE = "desk"  # in the run folder: the address, and the key

# What it wants and the connection itself, which is the answerer's from then on.
Answerer = Callable[[wire.Message, socket.socket], Awaitable[None]]


def _peer(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class ControlSocket:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder  # it moves when the nodes have come together
        self._key = os.urandom(16).hex()
        self._answerers: dict[str, Answerer] = {}
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # in order of arrival; each holds a descriptor
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        name = f"phalanx-desk-{os.urandom(8).hex()}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(16)
        self._loop.add_reader(self._listener.fileno(), self._called)
        with contextlib.suppress(OSError):  # a full disk: then nobody can ask
            fd = os.open(os.path.join(folder.path, _FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                file.write(f"{name} {self._key}\n")

    def answers(self, what: str, answerer: Answerer) -> None:
        self._answerers[what] = answerer
        self._begin(self._tell())

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _called(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self._listener.accept()
            if _peer(caller)[1] != os.getuid():
                caller.close()
                return
            task = self._begin(self._serve(caller))
            task.add_done_callback(lambda task: self._strangers.pop(task, None))
            self._strangers[task] = None
            if len(self._strangers) > _STRANGERS:
                first = next(iter(self._strangers))
                del self._strangers[first]
                first.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        with contextlib.suppress(OSError, ValueError, RecursionError):
            try:
                async with asyncio.timeout(_PATIENCE):
                    question = await self._heard(caller)
            except asyncio.CancelledError:
                caller.close()
                raise
            self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            answerer = await self._who_knows(str(question.get("ask")))
            if answerer is not None:
                caller.setblocking(True)
                await answerer(question, caller)
                return
            wire.send(caller, {"is": "refused", "why": "none of its ranks has begun, or it knows no such question"})
        caller.close()

    async def _who_knows(self, what: str) -> Answerer | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SOON), self._news:
                await self._news.wait_for(lambda: what in self._answerers)
        return self._answerers.get(what)

    async def _heard(self, caller: socket.socket) -> wire.Message:
        size = wire.length(await self._exactly(caller, wire.HEAD))
        if size > _LONGEST:
            raise ValueError("too long for a question")
        question = json.loads(await self._exactly(caller, size))
        if not isinstance(question, dict) or not hmac.compare_digest(_spell(question.get("key")), _spell(self._key)):
            raise ValueError("not one that knows our key")
        return question

    async def _exactly(self, caller: socket.socket, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = await self._loop.sock_recv(caller, size - len(found))
            if not data:
                raise ConnectionResetError
            found += data
        return found

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder.path, _FILE))


def _spell(key: object) -> bytes:
    return str(key).encode(errors="replace")


def call(run: RunRecord, question: wire.Message) -> socket.socket:
    """The agent of a run on this machine, asked."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with open(os.path.join(run.folder, _FILE)) as file:
            name, key = file.read().split()
        _connect(sock, f"\0{name}")
        if _peer(sock) != (run.pid, os.getuid()):
            raise OSError("somebody else answers there")
        wire.send(sock, {**question, "key": key})
    except (OSError, ValueError) as error:
        sock.close()
        raise LaunchError(
            f"{run.id} cannot be asked: {getattr(error, 'strerror', None) or error}",
            details=[f"its agent is process {run.pid} on {run.host or 'this machine'}"],
            fix="phalanx ps shows what runs here",
        ) from None
    return sock


def _connect(sock: socket.socket, address: str) -> None:
    """Where many wait already, the kernel would have us wait with them for ever: an agent may be stopped."""
    end = time.monotonic() + SOON
    sock.setblocking(False)
    while True:
        try:
            sock.connect(address)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "it does not answer") from None
            time.sleep(0.05)
    sock.setblocking(True)
