"""The codec of events and messages: msgspec, as JSON, or as MessagePack for messages that contain bytes.

Received data is never unpickled. Two channels cannot use this module: the fork server and the probe have only the
standard library (forkserver/wire.py), and arguments sent over ssh must arrive byte for byte
(launcher/remote/node_spec.py).

Python represents bytes that are not UTF-8 as lone surrogates: in arguments, file names and environment variables. An
exception's message may contain any. msgspec rejects them, so they are written as the bytes they represent: `\\xff`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")
Encoding = Literal["json", "msgpack"]

PACKET_LIMIT = 1 << 16  # bytes of a message that is one packet: between a worker and its agent

_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """Return a message as JSON."""
    try:
        return _json.encode(message)
    except UnicodeEncodeError:
        return _json.encode(valid(msgspec.to_builtins(message, str_keys=True)))


def encode_msgpack(message: Any) -> bytes:
    """Return a message as MessagePack. `?` replaces invalid text: fields have a maximum length, so none may grow."""
    try:
        return _msgpack.encode(message)
    except UnicodeEncodeError:
        return _msgpack.encode(_replaced(msgspec.to_builtins(message, builtin_types=(bytes,)), _questioned))


class Decoder(Generic[T]):
    """Decodes messages of another process, which may have sent anything: Decoder(kind).decode(data)."""

    def __init__(self, kind: Any, encoding: Encoding = "json") -> None:
        self._kind = kind
        self._encoding = encoding

    @cached_property
    def _decode(self) -> Callable[[bytes], T]:
        # Created on first use: it takes a millisecond, and every process imports many of them but needs few.
        made = msgspec.json.Decoder(self._kind) if self._encoding == "json" else msgspec.msgpack.Decoder(self._kind)
        decode: Callable[[bytes], T] = made.decode
        return decode

    def decode(self, data: bytes) -> T:
        """Return the message. Raises msgspec.DecodeError and nothing else."""
        try:
            return self._decode(data)
        except (UnicodeDecodeError, RecursionError) as error:  # msgspec does not convert these
            raise msgspec.DecodeError(str(error)) from None


def valid(value: Any) -> Any:
    """Return the same value with text that can be encoded."""
    return _replaced(value, _escaped)


def _replaced(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {_replaced(key, text): _replaced(item, text) for key, item in value.items()}
    return [_replaced(item, text) for item in value] if isinstance(value, list | tuple) else value


def _escaped(text: str) -> str:
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # other surrogates represent no byte
        return text.encode("utf-8", "backslashreplace").decode()


def _questioned(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
