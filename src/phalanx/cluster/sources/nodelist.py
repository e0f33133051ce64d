"""Expands node lists and counts of Slurm, without scontrol."""

from __future__ import annotations

import itertools
import math
import re

LIMIT = 1 << 16


def expand(text: str) -> tuple[str, ...]:
    """Expand `node[1-3,07],gpu1` to node1, node2, node3, node07, gpu1. Raises ValueError with the reason."""
    names: list[str] = []
    for entry in _entries(text):
        pieces = _pieces(entry)
        # Check the number before the names are built: a few characters can name billions.
        count = math.prod(len(piece) for piece in pieces)
        if len(names) + count > LIMIT:
            raise ValueError(f"{text[:80]!r} names more than {LIMIT} nodes")
        # The last bracket varies fastest, as with scontrol.
        names.extend("".join(choice) for choice in itertools.product(*map(_names, pieces)))
    return tuple(names)


def counts(text: str) -> tuple[int, ...]:
    """Expand `2(x3),1` to 2, 2, 2, 1: the tasks per node."""
    found: list[int] = []
    for entry in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", entry.strip(), re.ASCII)
        if match is None:
            raise ValueError(f"“{entry[:80]}” is not a count such as 2 or 2(x3)")
        times = int(match[2] or 1)
        if times < 1:
            raise ValueError(f"“{entry}” counts no node")
        if len(found) + times > LIMIT:
            raise ValueError(f"{text[:80]!r} counts more than {LIMIT} nodes")
        found.extend([int(match[1])] * times)
    return tuple(found)


class _Span:
    """A number or range inside brackets: `07`, `1-12`."""

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text, re.ASCII)
        if match is None:
            raise ValueError(f"“{text[:80]}” in brackets is not a number or range")
        self.first, self.last = int(match[1]), int(match[2] or match[1])
        self.width = len(match[1])
        if self.last < self.first:
            raise ValueError(f"the range {text} runs backwards")

    def __len__(self) -> int:
        return min(self.last - self.first, LIMIT) + 1  # len() cannot return more than a machine word

    def names(self) -> list[str]:
        return [f"{number:0{self.width}d}" for number in range(self.first, self.last + 1)]


class _Bracket:
    def __init__(self, text: str) -> None:
        self.spans = [_Span(part) for part in text.split(",")]

    def __len__(self) -> int:
        return sum(map(len, self.spans))


def _names(piece: list[str] | _Bracket) -> list[str]:
    if isinstance(piece, _Bracket):
        return [name for span in piece.spans for name in span.names()]
    return piece


def _entries(text: str) -> list[str]:
    """Return the parts between commas outside of brackets."""
    if not text.strip():
        raise ValueError("it is empty")
    entries, depth, start = [], 0, 0
    text = text.strip()
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"the brackets of “{text[:80]}” do not match")
        if letter == "," and not depth:
            entries.append(text[start:at])
            start = at + 1
    if depth:
        raise ValueError(f"the brackets of “{text[:80]}” do not match")
    return [*entries, text[start:]]


def _pieces(entry: str) -> list[list[str] | _Bracket]:
    """Split `rack[1-2]n[1-4]x` into rack, [1-2], n, [1-4], x."""
    if not entry:
        raise ValueError("a name between two commas is empty")
    pieces: list[list[str] | _Bracket] = []
    for plain, inside in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", entry):
        if plain and not re.fullmatch(r"[A-Za-z0-9._-]+", plain):
            raise ValueError(f"“{entry[:80]}” is not a node name")
        pieces.append([plain] if plain else _Bracket(inside))
    if entry.startswith("-"):
        raise ValueError(f"“{entry[:80]}” is not a node name: it begins with a dash")
    return pieces
