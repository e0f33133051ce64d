"""Messages between the leader and the other nodes, beside those of the run itself. Each has a kind and a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.control import messages

Handler = Callable[[int | None, int, bytes], None]  # sender (None: this node or the leader), number, content


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
    """Sends messages to other nodes, in frames of limited size, and dispatches those that arrive."""

    def __init__(self, carrier: RpcCarrier) -> None:
        self._carrier = carrier
        self._handlers: dict[str, Handler] = {}
        self._partial: dict[int | None, _PartialMessage] = {}  # by sender: its frames arrive in order

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler` for messages of this kind."""
        self._handlers[kind] = handler

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
