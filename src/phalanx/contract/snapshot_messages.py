"""What a worker asks of the memory that its agent holds: one packet there, one back, perhaps with a descriptor.

The memory has no name in the file system: it is gone when the last process that holds it is.
"""

from __future__ import annotations

import msgspec

LARGEST = 1 << 16


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """A memory to write, of so many bytes. It may be one that is there already."""

    name: str
    size: int


class Show(msgspec.Struct, frozen=True, tag="show"):
    """A memory to read."""

    name: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """It is not needed any more."""

    name: str


class Count(msgspec.Struct, frozen=True, tag="count"):
    """What is there?"""


class Answer(msgspec.Struct, frozen=True):
    names: list[str] = []
    refused: str = ""  # why no memory comes with this


Question = Lend | Show | Drop | Count
_encoder = msgspec.json.Encoder()
_question: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    return _encoder.encode(message)


def question(packet: bytes) -> Question:
    return _question.decode(packet)


def answer(packet: bytes) -> Answer:
    return _answer.decode(packet)
