"""Requests of a worker to the agent about snapshot memory: one packet each way, which may carry a descriptor.

The memory has no name in the file system. It is freed when the last process that holds it ends.
"""

from __future__ import annotations

import msgspec

from phalanx.contract.encoding import Decoder


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Request memory of `size` bytes to write to. It may exist already."""

    name: str
    size: int


class Show(msgspec.Struct, frozen=True, tag="show"):
    """Request memory to read."""

    name: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Free memory."""

    name: str


class Count(msgspec.Struct, frozen=True, tag="count"):
    """Request the names of all memory."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to any request."""

    names: list[str] = []
    refused: str = ""  # why no memory is returned


Question = Lend | Show | Drop | Count
question: Decoder[Question] = Decoder(Question)
answer: Decoder[Answer] = Decoder(Answer)
