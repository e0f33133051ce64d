"""Which ranks share a node, as a short text that every worker has: PHALANX_TOPOLOGY.

8*2,2       two nodes of 8 ranks, then one of 2, numbered consecutively
0.2/1.3     another order, assigned by a scheduler: the ranks of each node
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from phalanx.contract.ranks.placement import MAX_RANKS


def encode(nodes: Sequence[Sequence[int]]) -> str:
    """Return the ranks of each node, in the order of nodes, as text."""
    flat = [rank for ranks in nodes for rank in ranks]
    if flat != list(range(len(flat))):
        return "/".join(".".join(map(str, ranks)) for ranks in nodes)
    runs = [(size, len(list(same))) for size, same in groupby(len(ranks) for ranks in nodes)]
    return ",".join(str(size) if times == 1 else f"{size}*{times}" for size, times in runs)


def decode(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node. Raises ValueError for text that `encode` never writes."""
    if not text:
        raise ValueError("it is empty")
    if "/" in text or "." in text:
        nodes = tuple(tuple(int(rank) for rank in part.split(".")) for part in text.split("/"))
        if sorted(rank for ranks in nodes for rank in ranks) != list(range(sum(map(len, nodes)))):
            raise ValueError(f'"{text}" does not name every rank once')
        return nodes
    found: list[tuple[int, ...]] = []
    first = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\*(\d+))?", part, re.ASCII)
        if match is None:
            raise ValueError(f'"{part}" is not a number of ranks')
        size, times = int(match[1]), int(match[2] or 1)
        if size < 1 or first + size * times > MAX_RANKS:
            raise ValueError(f'"{part}" is not a number of ranks that can be')
        for _ in range(times):
            found.append(tuple(range(first, first + size)))
            first += size
    return tuple(found)
