"""What a worker asks the agent about snapshot memory: one packet each way, perhaps with a descriptor.

The memory has no name in the file system. It is freed when the last process that holds it ends.
"""

from __future__ import annotations

import msgspec

LARGEST = 1 << 16


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
    """Ask for the names of all memory."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to any request."""

    names: list[str] = []
    refused: str = ""  # why no memory comes with this


Question = Lend | Show | Drop | Count
_encoder = msgspec.json.Encoder()
_question: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """Return a message as a packet."""
    return _encoder.encode(message)


def question(packet: bytes) -> Question:
    """Return the request of a packet. Raises msgspec.MsgspecError."""
    return _question.decode(packet)


def answer(packet: bytes) -> Answer:
    """Return the answer of a packet. Raises msgspec.MsgspecError."""
    return _answer.decode(packet)
