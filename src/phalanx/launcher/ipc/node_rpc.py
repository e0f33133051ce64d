"""Messages and requests between the leader and the other nodes, beside the messages of the run itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.control import messages
from phalanx.launcher.ipc.pending_replies import PendingReplies

logger = logging.getLogger(__name__)

_REPLY = "reply"  # the kind of all replies; their number is that of the request

Handler = Callable[[int | None, int, bytes], None]  # sender (None: this node or the leader), number, content
RequestHandler = Callable[[int | None, bytes], Awaitable[bytes | None]]  # sender, content -> reply; None: no reply


class RpcCarrier(Protocol):
    """The coordinator, as far as messages between nodes need it."""

    @property
    def leads(self) -> bool:
        """Return whether this node is the leader."""
        ...

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each follower. Empty on a node that does not lead."""
        ...

    @property
    def skew(self) -> float:
        """Return the clock of this node minus the leader's, in seconds."""
        ...

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Send a frame to a member or, if `to` is None, to the leader."""

    def address(self, member: int) -> str:
        """Return the address of a member as seen from here. Empty if unknown."""
        ...


class NodeRpc:
    """Sends messages and requests to other nodes, in frames of limited size, and dispatches those that arrive."""

    def __init__(self, carrier: RpcCarrier) -> None:
        self._carrier = carrier
        self._handlers: dict[str, Handler] = {_REPLY: self._reply_received}
        self._replies: PendingReplies[bytes] = PendingReplies()
        self._tasks: set[asyncio.Task[None]] = set()  # that answer requests
        self._partial: dict[int | None, _PartialMessage] = {}  # by sender: its frames arrive in order

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler` for messages of this kind."""
        self._handlers[kind] = handler

    def serve(self, kind: str, handler: RequestHandler) -> None:
        """Answer requests of this kind with what `handler` returns."""

        def start(sender: int | None, number: int, content: bytes) -> None:
            task = asyncio.get_running_loop().create_task(self._answer(handler, kind, sender, number, content))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._handlers[kind] = start

    def send(self, kind: str, number: int, content: bytes, to: int | None = None) -> None:
        """Send a message to a member or, if `to` is None, to the leader, which may be this node."""
        if to is None and self._carrier.leads:
            self._dispatch(None, kind, number, content)
            return
        size = messages.RPC_FRAME_LIMIT
        parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
        for index, part in enumerate(parts):
            frame = messages.RpcFrame(kind=kind, number=number, content=part, more=index + 1 < len(parts))
            self._carrier.send_rpc(frame, to)

    async def request(self, kind: str, content: bytes = b"", *, timeout: float, to: int | None = None) -> bytes:
        """Send a request to a member or, if `to` is None, to the leader; return the reply. Raises TimeoutError."""
        return await self._replies.request(
            lambda number: self.send(kind, number, content, to=to), timeout=timeout, peer=to
        )

    def receive(self, sender: int | None, frame: messages.RpcFrame) -> None:
        """Take a frame. Each sender can have one unfinished message; one that is too long is dropped."""
        partial = self._partial.pop(sender, None)
        if partial is None or partial.key != (frame.kind, frame.number):
            partial = _PartialMessage((frame.kind, frame.number))
        partial.add(frame.content)
        if frame.more:
            self._partial[sender] = partial
        elif not partial.too_long:
            self._dispatch(sender, frame.kind, frame.number, bytes(partial.content))

    def _dispatch(self, sender: int | None, kind: str, number: int, content: bytes) -> None:
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(sender, number, content)

    async def _answer(
        self, handler: RequestHandler, kind: str, sender: int | None, number: int, content: bytes
    ) -> None:
        try:
            reply = await handler(sender, content)
        except Exception:  # the other node gets no reply, and reports that
            logger.warning("cannot answer the request %r of %s", kind, _name(sender), exc_info=True)
            return
        if reply is not None:
            self.send(_REPLY, number, reply, to=sender)

    def _reply_received(self, sender: int | None, number: int, content: bytes) -> None:
        self._replies.resolve(number, content, peer=sender)


def _name(sender: int | None) -> str:
    return "the leader" if sender is None else f"node {sender}"


@dataclass
class _PartialMessage:
    """A message of which more frames follow."""

    key: tuple[str, int]  # kind and number
    content: bytearray = field(default_factory=bytearray)
    too_long: bool = False

    def add(self, part: bytes) -> None:
        self.too_long = self.too_long or len(self.content) + len(part) > messages.RPC_LIMIT
        if self.too_long:
            self.content.clear()
        else:
            self.content += part
