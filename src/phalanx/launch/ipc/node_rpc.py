"""What nodes write to each other beside the run itself: letters of a kind, to node 0 or from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.control import messages

Reader = Callable[[int | None, int, bytes], None]  # who wrote (None: this node itself, or node 0), number, content


class RpcCarrier(Protocol):
    """The company: it knows the ways."""

    @property
    def leads(self) -> bool: ...
    def members(self) -> dict[int, tuple[int, ...]]:
        """Of whom this node is the leader, itself left out: their ranks."""
        ...

    @property
    def skew(self) -> float:
        """The clock of this node minus that of the one that leads."""
        ...

    def carry(self, letter: messages.RpcFrame, to: int | None) -> None:
        """To a member; None: to the leader, where that is another node."""

    def address(self, member: int) -> str:
        """Of a member, as seen from here; empty: nobody knows."""
        ...


class NodeRpc:
    def __init__(self, carrier: RpcCarrier) -> None:
        self._carrier = carrier
        self._readers: dict[str, Reader] = {}
        self._begun: dict[int | None, _Begun] = {}  # by who writes: the parts of a letter come one after the other

    def reads(self, kind: str, reader: Reader) -> None:
        self._readers[kind] = reader

    def send(self, kind: str, number: int, content: bytes, to: int | None = None) -> None:
        """To a member, or to the leader (None), which may be this node itself."""
        if to is None and self._carrier.leads:
            self._deliver(None, kind, number, content)
            return
        size = messages.RPC_FRAME_LIMIT
        parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
        for index, part in enumerate(parts):
            letter = messages.RpcFrame(kind=kind, number=number, content=part, more=index + 1 < len(parts))
            self._carrier.carry(letter, to)

    def heard(self, who: int | None, letter: messages.RpcFrame) -> None:
        """Of a letter that is too long, nothing is read, and nobody has more than one that is not at its end."""
        begun = self._begun.pop(who, None)
        if begun is None or begun.of != (letter.kind, letter.number):
            begun = _Begun((letter.kind, letter.number))
        begun.add(letter.content)
        if letter.more:
            self._begun[who] = begun
        elif not begun.too_long:
            self._deliver(who, letter.kind, letter.number, bytes(begun.content))

    def _deliver(self, who: int | None, kind: str, number: int, content: bytes) -> None:
        reader = self._readers.get(kind)
        if reader is not None:
            reader(who, number, content)


@dataclass
class _Begun:
    """A letter, as far as it has come."""

    of: tuple[str, int]  # kind and number
    content: bytearray = field(default_factory=bytearray)
    too_long: bool = False

    def add(self, part: bytes) -> None:
        self.too_long = self.too_long or len(self.content) + len(part) > messages.RPC_LIMIT
        if self.too_long:
            self.content.clear()
        else:
            self.content += part
