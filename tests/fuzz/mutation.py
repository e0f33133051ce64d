"""Changes valid input: its bytes, or its structure."""

from __future__ import annotations

import random
from typing import Any

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64 - 1, 1e308, -0.0, float("inf"), float("nan")),
    *("", "\0", "\x1b]0;x\x07", "../../etc/passwd", "é" * 70, "x" * 70_000, b"", b"\xff" * 40, [], {}, [[]], {"": 0}),
)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one to three changes: replaced, cut, inserted, repeated, or one bit flipped."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        if not changed:
            return b""
        place = chance.randrange(len(changed))
        match chance.randrange(6):
            case 0:
                changed[place] = chance.randrange(256)
            case 1:
                del changed[place:]
            case 2:
                changed[place:place] = chance.randbytes(chance.randrange(1, 40))
            case 3:
                del changed[place : place + chance.randrange(1, 20)]
            case 4:
                changed[place:place] = changed[place : place + chance.randrange(1, 60)] * chance.randrange(1, 5)
            case _:
                changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed)


def altered(value: Any, chance: random.Random) -> Any:
    """Return a value of dicts, lists and plain values in which one place is changed."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice([*value])
        match chance.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, chance.choice(["", "is", "$tensor", "$dict", "$device", "__class__"]): odd(chance)}
            case _:
                return {**value, key: altered(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value[:place] + [value[place]] * chance.randrange(2, 5) + value[place + 1 :]
            case _:
                return [*value[:place], altered(value[place], chance), *value[place + 1 :]]
    if isinstance(value, int) and chance.random() < 0.5:
        return value + chance.choice([-1, 1, 1 << 20, -(1 << 40), value])
    return odd(chance)


def odd(chance: random.Random) -> Any:
    """Return a value that readers may not expect."""
    if chance.random() < 0.02:
        nested: Any = []
        for _ in range(chance.choice([50, 400])):
            nested = [nested]
        return nested
    return chance.choice(_ODD)
