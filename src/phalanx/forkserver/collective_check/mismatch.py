"""The error for ranks that call different collectives. It names all places, and is reported once."""

from __future__ import annotations

import os
from typing import NamedTuple


class CollectiveMismatchError(RuntimeError):
    """Ranks are about to call different collectives (--check-collectives)."""

    in_words = True  # the message names the places that matter, not the one it was raised at


CollectiveMismatchError.__module__ = "phalanx"  # name in tracebacks


class Side(NamedTuple):
    """Ranks that make the same call, and the place of the first of them."""

    ranks: tuple[int, ...]
    call: str  # all_reduce(float32 [10], SUM)
    file: str
    line: int
    source: str


def sides(marks: dict[int, int], texts: dict[int, bytes]) -> list[Side]:
    """Group the ranks by call, the smallest group first: it is more likely wrong. Of two equal groups, the one without
    the lowest rank comes first.
    """
    by_mark: dict[int, list[int]] = {}
    for rank in sorted(marks):
        by_mark.setdefault(marks[rank], []).append(rank)
    found = []
    for ranks in sorted(by_mark.values(), key=lambda ranks: (len(ranks), -ranks[0])):
        call, file, line, source = (*texts[ranks[0]].decode(errors="replace").split("\0"), "", "", "", "")[:4]
        found.append(Side(tuple(ranks), call, file, int(line) if line.isdecimal() else 0, source))
    return found


def reporter(found: list[Side]) -> int:
    """Return the rank that reports the mismatch, so that it is reported once."""
    return found[0].ranks[0]


def message(found: list[Side], number: int, group: str) -> str:
    """Return the message."""
    names = [side.call.partition("(")[0] for side in found]
    calls = names if len(set(names)) == len(names) else [side.call for side in found]
    first, *others = [(format_ranks(side.ranks), call) for side, call in zip(found, calls, strict=True)]
    where = " and ".join(f"{ranks} called {call}" for ranks, call in others)
    lines = [f"{first[0]} called {first[1]} where {where} (collective {number} of {group})"]
    for side in found:
        lines.append(f"  {format_ranks(side.ranks)}: {side.call} at {_relative(side.file)}:{side.line}")
        if side.source:
            lines.append(f"      {side.source}")
    return "\n".join(lines)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Return "rank 3" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {list_ranks(ranks)}"


def list_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """Return the ranks as text, at most eight."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _relative(file: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return file.removeprefix(here)
