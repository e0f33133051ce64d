"""JSON for events and messages, also where text is not valid Unicode.

Python keeps bytes that are not UTF-8 as lone surrogates: in arguments, file names and environment variables. An
exception's message may contain any. msgspec refuses them, so they are written as the bytes they stand for: `\\xff`.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def encode(message: Any) -> bytes:
    """Return a message as JSON."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(valid(msgspec.to_builtins(message, str_keys=True)))


def valid(value: Any) -> Any:
    """Return the same value with text that can be encoded."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # other surrogates stand for no byte
            return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {valid(key): valid(item) for key, item in value.items()}
    return [valid(item) for item in value] if isinstance(value, list | tuple) else value
