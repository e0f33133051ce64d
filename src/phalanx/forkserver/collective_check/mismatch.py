"""Two ranks call different collectives: told with both places, once."""

from __future__ import annotations

import os
from typing import NamedTuple


class CollectiveMismatchError(RuntimeError):
    in_words = True  # its text names the places that matter: the one that it was raised at does not


CollectiveMismatchError.__module__ = "phalanx"  # under which a traceback names it


class Side(NamedTuple):
    """Ranks that call the same, and where the first of them does."""

    ranks: tuple[int, ...]
    call: str  # all_reduce(float32 [10], SUM)
    file: str
    line: int
    source: str


def sides(marks: dict[int, int], texts: dict[int, bytes]) -> list[Side]:
    """The fewest first: they are rather the ones who are wrong. Of two alike, those without the lowest rank."""
    by_mark: dict[int, list[int]] = {}
    for rank in sorted(marks):
        by_mark.setdefault(marks[rank], []).append(rank)
    found = []
    for ranks in sorted(by_mark.values(), key=lambda ranks: (len(ranks), -ranks[0])):
        call, file, line, source = (*texts[ranks[0]].decode(errors="replace").split("\0"), "", "", "", "")[:4]
        found.append(Side(tuple(ranks), call, file, int(line) if line.isdecimal() else 0, source))
    return found


def loud(found: list[Side]) -> int:
    """Who tells it, so that it is told once."""
    return found[0].ranks[0]


def told(found: list[Side], number: int, group: str) -> str:
    names = [side.call.partition("(")[0] for side in found]
    calls = names if len(set(names)) == len(names) else [side.call for side in found]
    first, *others = [(who(side.ranks), call) for side, call in zip(found, calls, strict=True)]
    where = " and ".join(f"{ranks} called {call}" for ranks, call in others)
    lines = [f"{first[0]} called {first[1]} where {where} (collective {number} of {group})"]
    for side in found:
        lines.append(f"  {who(side.ranks)}: {side.call} at {_short(side.file)}:{side.line}")
        if side.source:
            lines.append(f"      {side.source}")
    return "\n".join(lines)


def who(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks)}"


def few(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _short(file: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return file.removeprefix(here)
