"""The Unix socket on which the agent answers requests of other commands: `phalanx why`, `attach`, viewers.

The socket has an abstract address. A caller must have the same user id, which the kernel reports, and know a key from
the run folder: another container may share the network namespace and the user id.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from phalanx.errors import LaunchError
from phalanx.forkserver import linux, wire
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord

_REQUEST_TIMEOUT = 5.0  # seconds for a caller to send its request
_REPLY_TIMEOUT = 5.0  # seconds for a caller to read the reply
HANDLER_TIMEOUT = 10.0  # seconds for a handler to be registered: the run may have just started
_LONGEST = 1 << 16  # bytes of a request
_MAX_PENDING = 32  # callers that have not sent their request yet: beyond that, the oldest is dropped
_FILE = "control"  # in the run folder: the address and the key

# Takes the request and the connection, and closes the connection.
ConnectionHandler = Callable[[wire.Message, socket.socket], Awaitable[None]]
RequestHandler = Callable[[wire.Message], Awaitable[wire.Message]]  # returns the reply


class ControlSocket:
    """Listens for requests about this run, and passes each to the handler of its kind."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder  # its path changes when the nodes have joined
        self._key = os.urandom(16).hex()
        self._handlers: dict[str, ConnectionHandler] = {}
        self._registered = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[asyncio.Task[None], None] = {}  # in order of arrival; each holds a file descriptor
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        name = f"phalanx-control-{os.urandom(8).hex()}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(16)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        with contextlib.suppress(OSError):  # a full disk: then nobody can connect
            fd = os.open(os.path.join(folder.path, _FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                file.write(f"{name} {self._key}\n")

    def on(self, kind: str, handler: ConnectionHandler) -> None:
        """Pass the connection to `handler` for requests of this kind: more than one reply follows."""
        self._handlers[kind] = handler
        self._start(self._notify())

    def serve(self, kind: str, handler: RequestHandler) -> None:
        """Answer requests of this kind with what `handler` returns."""

        async def answer(request: wire.Message, caller: socket.socket) -> None:
            with caller:
                reply = await asyncio.to_thread(wire.encode, await handler(request))
                caller.setblocking(False)
                # Not in a thread: a caller that does not read would occupy one of the few.
                with contextlib.suppress(OSError):
                    async with asyncio.timeout(_REPLY_TIMEOUT):
                        await self._loop.sock_sendall(caller, reply)

        self.on(kind, answer)

    async def _notify(self) -> None:
        async with self._registered:
            self._registered.notify_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            caller, _ = self._listener.accept()
            if not linux.peer(caller).is_same_user:
                caller.close()
                return
            task = self._start(self._serve(caller))
            task.add_done_callback(lambda task: self._pending.pop(task, None))
            self._pending[task] = None
            if len(self._pending) > _MAX_PENDING:
                first = next(iter(self._pending))
                del self._pending[first]
                first.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        with contextlib.suppress(OSError, ValueError):
            try:
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    request = await self._read_request(caller)
            except asyncio.CancelledError:
                caller.close()
                raise
            self._pending.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            handler = await self._handler(str(request.get("ask")))
            if handler is not None:
                caller.setblocking(True)
                await handler(request, caller)
                return
            wire.send(caller, {"is": "refused", "why": "none of its ranks has started, or the request is unknown"})
        caller.close()

    async def _handler(self, kind: str) -> ConnectionHandler | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDLER_TIMEOUT), self._registered:
                await self._registered.wait_for(lambda: kind in self._handlers)
        return self._handlers.get(kind)

    async def _read_request(self, caller: socket.socket) -> wire.Message:
        reader = wire.MessageReader(_LONGEST)
        while data := await self._loop.sock_recv(caller, reader.missing):
            request = reader.feed(data)
            if request is not None:
                if not hmac.compare_digest(_bytes(request.pop("key", None)), _bytes(self._key)):
                    raise ValueError("wrong key")
                return request
        raise ConnectionResetError

    def close(self) -> None:
        """Stop listening, and drop all callers."""
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder.path, _FILE))


def _bytes(key: object) -> bytes:
    return str(key).encode(errors="replace")


def request(run: RunRecord, message: wire.Message, *, timeout: float) -> wire.Message:
    """Send a request to the agent of a run on this host, and return its reply.

    Raises LaunchError if it cannot be reached, ConnectionResetError if it ends before it replies, and TimeoutError.
    """
    with call(run, message) as sock:
        sock.settimeout(timeout)
        received = wire.receive(sock)
    if received is None:
        raise ConnectionResetError
    return received[0]


def call(run: RunRecord, request: wire.Message) -> socket.socket:
    """Send a request to the agent of a run on this host, and return the connection. Raises LaunchError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with open(os.path.join(run.folder, _FILE)) as file:
            name, key = file.read().split()
        _connect(sock, f"\0{name}")
        peer = linux.peer(sock)
        if peer.pid != run.pid or not peer.is_same_user:
            raise OSError("another process answers at its address")
        wire.send(sock, {**request, "key": key})
    except (OSError, ValueError) as error:
        sock.close()
        raise LaunchError(
            f"{run.id} does not answer: {getattr(error, 'strerror', None) or error}",
            details=[f"its agent is process {run.pid} on {run.host or 'this host'}"],
            fix="phalanx ps lists the runs on this host",
        ) from None
    return sock


def _connect(sock: socket.socket, address: str) -> None:
    """Connect with a timeout: where the backlog is full, the kernel would block for as long as the agent is stopped."""
    end = time.monotonic() + HANDLER_TIMEOUT
    sock.setblocking(False)
    while True:
        try:
            sock.connect(address)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "its agent does not accept connections") from None
            time.sleep(0.05)
    sock.setblocking(True)
