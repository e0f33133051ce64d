"""What nodes write to each other beside the run itself: letters of a kind, to node 0 or from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.control import messages

Reader = Callable[[int | None, int, bytes], None]  # who wrote (None: this node itself, or node 0), number, content


class Carrier(Protocol):
    """The company: it knows the ways."""

    @property
    def leads(self) -> bool: ...
    def members(self) -> dict[int, tuple[int, ...]]:
        """Of whom this node is the leader, itself left out: their ranks."""
        ...

    def carry(self, letter: messages.Letter, to: int | None) -> None:
        """To a member; None: to the leader, where that is another node."""


class Post:
    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._readers: dict[str, Reader] = {}
        self._parts: dict[tuple[int | None, str, int], list[bytes]] = {}

    def reads(self, kind: str, reader: Reader) -> None:
        self._readers[kind] = reader

    def send(self, kind: str, number: int, content: bytes, to: int | None = None) -> None:
        """To a member, or to the leader (None), which may be this node itself."""
        if to is None and self._carrier.leads:
            self._deliver(None, kind, number, content)
            return
        size = messages.LETTER_LIMIT
        parts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
        for index, part in enumerate(parts):
            letter = messages.Letter(kind=kind, number=number, content=part, more=index + 1 < len(parts))
            self._carrier.carry(letter, to)

    def heard(self, who: int | None, letter: messages.Letter) -> None:
        key = (who, letter.kind, letter.number)
        parts = self._parts.setdefault(key, [])
        parts.append(letter.content)
        if sum(map(len, parts)) > messages.LETTERS_LIMIT:
            del self._parts[key]
        elif not letter.more:
            del self._parts[key]
            self._deliver(who, letter.kind, letter.number, b"".join(parts))

    def _deliver(self, who: int | None, kind: str, number: int, content: bytes) -> None:
        reader = self._readers.get(kind)
        if reader is not None:
            reader(who, number, content)
