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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import msgspec

from phalanx.contract import encoding
from phalanx.errors import LaunchError
from phalanx.forkserver import linux, wire
from phalanx.launcher.ipc import control_messages
from phalanx.launcher.ipc.control_messages import AnyQuery, AnyReply, ControlCall, ControlQuery, QueryRefused, WhyQuery
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord

_REQUEST_TIMEOUT = 5.0  # seconds for a caller to send its request
_REPLY_TIMEOUT = 5.0  # seconds for a caller to read the reply
HANDLER_TIMEOUT = 10.0  # seconds for a handler to be registered: the run may have just started
NOT_STARTED = "none of its ranks has started"
STARTING = 5.0  # seconds for a run that has just started to open its socket
_MAX_PENDING = 32  # callers that have not sent their request yet: beyond that, the oldest is dropped
_FILE = "control"  # in the run folder: the address and the key

Q = TypeVar("Q", bound=ControlQuery)
R = TypeVar("R", bound=AnyReply)
ConnectionHandler = Callable[[Q, socket.socket], Awaitable[None]]  # closes the connection
QueryHandler = Callable[[Q], Awaitable[AnyReply]]


class ControlSocket:
    """Listens for requests about this run, and passes each to the handler of its kind."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder  # its path changes when the nodes have joined
        self._key = os.urandom(16).hex()
        self._handlers: dict[type[ControlQuery], ConnectionHandler[Any]] = {}
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

    def on(self, kind: type[Q], handler: ConnectionHandler[Q]) -> None:
        """Pass the connection to `handler` for queries of this kind: more than one reply follows."""
        self._handlers[kind] = handler
        self._start(self._notify())

    def serve(self, kind: type[Q], handler: QueryHandler[Q]) -> None:
        """Answer queries of this kind with the result of `handler`."""

        async def answer(query: Q, caller: socket.socket) -> None:
            with caller:
                reply = wire.frame(await asyncio.to_thread(encoding.encode, await handler(query)))
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
                    query = await self._read_query(caller)
            except asyncio.CancelledError:
                caller.close()
                raise
            self._pending.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            if isinstance(query, QueryRefused):
                send(caller, query)
            elif (handler := await self._handler(type(query))) is not None:
                caller.setblocking(True)
                await handler(query, caller)
                return
            else:
                send(caller, QueryRefused(why=NOT_STARTED))
        caller.close()

    async def _handler(self, kind: type[ControlQuery]) -> ConnectionHandler[Any] | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDLER_TIMEOUT), self._registered:
                await self._registered.wait_for(lambda: kind in self._handlers)
        return self._handlers.get(kind)

    async def _read_query(self, caller: socket.socket) -> AnyQuery | QueryRefused:
        """Return the query, or why it is invalid. Raises ValueError for a caller that does not know the key."""
        reader = wire.FrameReader(control_messages.QUERY_LIMIT)
        while data := await self._loop.sock_recv(caller, reader.missing):
            body = reader.feed_frame(data)
            if body is not None:
                call = control_messages.calls.decode(body)
                if not hmac.compare_digest(call.key.encode(), self._key.encode()):
                    raise ValueError("wrong key")
                try:
                    return control_messages.queries.decode(bytes(call.query))
                except msgspec.DecodeError as error:  # from another version of phalanx
                    return QueryRefused(why=f"invalid query: {error}")
        raise ConnectionResetError

    def close(self) -> None:
        """Stop listening, and drop all callers."""
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder.path, _FILE))


def send(sock: socket.socket, reply: AnyReply, fds: Sequence[int] = ()) -> None:
    """Send a reply, with descriptors."""
    wire.send_frame(sock, encoding.encode(reply), list(fds))


def receive(sock: socket.socket, limit: int = control_messages.REPLY_LIMIT) -> tuple[AnyReply, list[int]]:
    """Return the next reply, with descriptors. Raises ConnectionResetError, and LaunchError if it cannot be read."""
    try:
        received = wire.FrameReader(limit).receive_frame(sock)
        if received is not None:
            return control_messages.replies.decode(received[0]), received[1]
    except ValueError as error:
        raise LaunchError(f"unreadable reply of the agent: {error}") from None
    raise ConnectionResetError


def request(run: RunRecord, query: AnyQuery, kind: type[R], *, timeout: float) -> R | QueryRefused:
    """Send a query to the agent of a run on this host, and return its reply.

    Raises LaunchError if it cannot be reached, ConnectionResetError if it ends before it replies, and TimeoutError.
    """
    with call(run, query) as sock:
        sock.settimeout(timeout)
        limit = control_messages.WHY_LIMIT if isinstance(query, WhyQuery) else control_messages.REPLY_LIMIT
        reply, _ = receive(sock, limit)
    if not isinstance(reply, kind | QueryRefused):
        raise LaunchError(f"unexpected reply of {run.id}: {type(reply).__name__}")
    return cast("R | QueryRefused", reply)


def call(run: RunRecord, query: AnyQuery) -> socket.socket:
    """Send a query to the agent of a run on this host, and return the connection. Raises LaunchError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name, key = _address(run)
        _connect(sock, f"\0{name}")
        peer = linux.peer(sock)
        if peer.pid != run.pid or not peer.is_same_user:
            raise OSError("another process answers at its address")
        wire.send_frame(sock, encoding.encode(ControlCall(key=key, query=msgspec.Raw(encoding.encode(query)))))
    except (OSError, ValueError) as error:
        sock.close()
        raise LaunchError(
            f"{run.id} does not answer: {getattr(error, 'strerror', None) or error}",
            details=[f"its agent is process {run.pid} on {run.host or 'this host'}"],
            fix="phalanx ps lists the runs on this host",
        ) from None
    return sock


def _address(run: RunRecord) -> tuple[str, str]:
    """Return the address and the key of a run. A run that has just started has none: wait for it for a moment."""
    end = time.monotonic() + STARTING
    while True:
        try:
            with open(os.path.join(run.folder, _FILE)) as file:
                name, key = file.read().split()
            return name, key
        except (FileNotFoundError, ValueError):
            if not run.alive:
                raise
            if time.monotonic() > end:
                raise OSError("it is starting: try again in a moment") from None
        time.sleep(0.05)


def _connect(sock: socket.socket, address: str) -> None:
    """Connect with a timeout: if the backlog is full, the kernel would block while the agent is stopped."""
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
