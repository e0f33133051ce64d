"""Streams between a debugger on one node and the terminal of a user on another.

    i interrupt   n not interrupted        messages of a stream; the others are StreamProxy's

A node opens a stream by a request of kind "attach", and chooses its number: even on the leader, odd on followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Collection
from typing import Annotated, Protocol

import msgspec

from phalanx.contract import encoding
from phalanx.contract.encoding import Decoder
from phalanx.launcher.debug.attachment import Attachment, AttachRefused
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.ipc.stream_proxy import StreamProxy

KIND = "debug"
ATTACH = "attach"
NODE_TIMEOUT = 20.0  # seconds for another node, or for a debugger that must be imported first
_MAX_STREAMS = 64  # that another node may have open here
_HOW = ("breakpoint", "stopped", "looking")
_DATA = (b"d", b"a", b"e", b"c")  # for the StreamProxy

StreamKey = tuple[int | None, int]  # the other node (None: the leader), and the number of the stream


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of another node to open a stream to the debugger of a rank."""

    stream: Annotated[int, msgspec.Meta(ge=1)]
    rank: int
    by: str = ""
    port: int | None = None
    waits: bool = False


class AttachReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An Attachment without its socket, or why there is none."""

    how: str = ""
    place: str = ""
    port: int = 0
    host: str = ""
    why: str = ""
    fix: str = ""


_attach_requests: Decoder[AttachRequest] = Decoder(AttachRequest)
_attach_replies: Decoder[AttachReply] = Decoder(AttachReply)


class StreamEvents(Protocol):
    """What the streams need from the debug sessions of their node."""

    async def attach_for_node(self, who: int | None, request: AttachRequest) -> Attachment:
        """Attach a debugger for another node (None: the leader). Raises AttachRefused."""
        ...

    async def interrupt(self, rank: int) -> bool:
        """Interrupt a rank. Return False if it is known not to have stopped."""
        ...

    def interrupt_failed(self, rank: int) -> None:
        """Handle a rank on another node that cannot be interrupted."""

    def stream_opened(self) -> None:
        """Handle a new stream."""


class RemoteStreams:
    """The open streams of this node to other nodes."""

    def __init__(self, rpc: NodeRpc, links: NodeLinks, events: StreamEvents) -> None:
        self._rpc = rpc
        self._links = links
        self._events = events
        self._proxies: dict[StreamKey, StreamProxy] = {}
        self._on_close: dict[StreamKey, Callable[[], None]] = {}  # called when a stream ends
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        rpc.serve(ATTACH, self._answer)

    def __len__(self) -> int:
        return len(self._proxies)

    async def open(self, to: int | None, rank: int, *, by: str, port: int | None, waits: bool) -> Attachment:
        """Attach a debugger to a rank of another node. Raises AttachRefused."""
        key = (to, 2 * next(self._numbers) + (0 if self._links.leads else 1))
        proxy = self._start(key, rank)
        request = AttachRequest(stream=key[1], rank=rank, by=by, port=port, waits=waits)
        try:
            reply = await self._rpc.request(ATTACH, encoding.encode(request), to=to, timeout=NODE_TIMEOUT)
            answer = _attach_replies.decode(reply)
        except TimeoutError:
            answer = AttachReply(why="the other node does not answer")
        except msgspec.DecodeError:
            answer = AttachReply(why="unreadable answer of the other node")
        if answer.how in _HOW:
            ours, theirs = socket.socketpair()
            proxy.start(ours)
            return Attachment(answer.how, answer.place, sock=theirs, hang_up=proxy.close)
        self._proxies.pop(key, None)
        if answer.how == "listens":
            return Attachment("listens", port=answer.port, host=answer.host)
        raise AttachRefused(answer.why or "unreadable answer of the other node", answer.fix)

    def receive(self, key: StreamKey, kind: bytes, body: bytes) -> None:
        """Handle a message of a stream."""
        proxy = self._proxies.get(key)
        if kind in _DATA:
            if proxy is not None:
                proxy.receive(kind, body)
            elif kind == b"d":
                self._send(key, b"c")
        elif proxy is not None and kind == b"i" and not self._is_ours(key):
            task = asyncio.get_running_loop().create_task(self._interrupt(key, proxy.rank))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif proxy is not None and kind == b"n" and self._is_ours(key):
            self._events.interrupt_failed(proxy.rank)
            for other, one in self._proxies.items():  # streams that this node only forwards
                if one.rank == proxy.rank and not self._is_ours(other):
                    self._send(other, b"n")

    def interrupt(self, rank: int) -> None:
        """Ask the node of a rank to interrupt it."""
        for key, proxy in self._proxies.items():
            if proxy.rank == rank and self._is_ours(key):
                self._send(key, b"i")

    def close_lost(self, connected: Collection[int | None]) -> None:
        """Close the streams to nodes that are no longer connected."""
        for key, proxy in list(self._proxies.items()):
            if key[0] not in connected:
                proxy.close()

    def close(self) -> None:
        """Close all streams."""
        for task in self._tasks:
            task.cancel()
        for proxy in list(self._proxies.values()):
            proxy.close()

    def _send(self, key: StreamKey, kind: bytes, body: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self._rpc.send(KIND, key[1], kind + body, to=key[0])

    def _is_ours(self, key: StreamKey) -> bool:
        """Return whether this node attached the stream."""
        return key[1] % 2 == (0 if self._links.leads else 1)

    def _start(self, key: StreamKey, rank: int) -> StreamProxy:
        def send(message: bytes) -> None:
            self._send(key, message[:1], message[1:])

        def ended() -> None:
            if self._proxies.get(key) is proxy:
                del self._proxies[key]
            self._on_close.pop(key, lambda: None)()

        proxy = self._proxies[key] = StreamProxy(rank, send, ended)
        self._events.stream_opened()
        return proxy

    async def _answer(self, who: int | None, content: bytes) -> bytes | None:
        """Attach for another node. It is not trusted: a malformed request gets no answer."""
        try:
            request = _attach_requests.decode(content)
        except msgspec.DecodeError:
            return None
        key = (who, request.stream)
        theirs = sum(other[0] == who and not self._is_ours(other) for other in self._proxies)
        if key in self._proxies or self._is_ours(key) or theirs >= _MAX_STREAMS:
            return None
        proxy = self._start(key, request.rank)
        try:
            attached = await self._events.attach_for_node(who, request)
        except AttachRefused as refused:
            self._proxies.pop(key, None)
            return encoding.encode(AttachReply(why=refused.why, fix=refused.fix))
        if attached.sock is not None:
            self._on_close[key] = attached.hang_up
            proxy.start(attached.sock)
        else:
            self._proxies.pop(key, None)
        return encoding.encode(
            AttachReply(how=attached.how, place=attached.place, port=attached.port, host=attached.host)
        )

    async def _interrupt(self, key: StreamKey, rank: int) -> None:
        if not await self._events.interrupt(rank):
            self._send(key, b"n")
