"""All links between ranks: which are slow, and the picture of them in a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.bench.comm.cells import Hello, Link

if TYPE_CHECKING:
    from rich.table import Table

SLOW = 0.5  # of the median of its kind
_KIND = 3  # links that are enough to say what is usual
_FEW = 16  # ranks up to which every link is a number; of more, a shade
_SHADES = "░▒▓█"


@dataclass(frozen=True)
class Slow:
    link: Link
    usual: float  # bytes a second, median of its kind

    def text(self, hello: Hello | None) -> str:
        link = self.link
        ends = [_place(rank, hello) for rank in (link.source, link.target)]
        kind = "on one node" if link.near else "between nodes"
        return (
            f"{link.backend}, {link.ranks} ranks: the link from {ends[0]} to {ends[1]} is slow: "
            f"{link.speed / 1e9:.2f} GB/s, where others {kind} have {self.usual / 1e9:.2f}"
        )


def slow(links: Sequence[Link]) -> list[Slow]:
    """Those below half of the median of their kind: on one node, or between nodes."""
    kinds: dict[tuple[int, str, bool], list[Link]] = {}
    for link in links:
        kinds.setdefault((link.ranks, link.backend, link.near), []).append(link)
    found = []
    for of_kind in kinds.values():
        if len(of_kind) < _KIND:
            continue
        usual = statistics.median(link.speed for link in of_kind)
        found += [Slow(link, usual) for link in of_kind if link.speed < SLOW * usual]
    return found


def table(links: Sequence[Link]) -> Table:
    """Rows send, columns receive. All of one backend and number of ranks."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ranks, backend = links[0].ranks, links[0].backend
    by_ends = {(link.source, link.target): link for link in links}
    marked = {(one.link.source, one.link.target) for one in slow(links)}
    low, high = min(link.speed for link in links), max(link.speed for link in links)
    few = ranks <= _FEW
    latency = statistics.median(link.latency for link in links)
    title = (
        f"{backend}, {ranks} ranks: GB/s from each rank (rows) to each other; {latency * 1e6:.1f} µs one way (median)"
    )
    found = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1 if few else 0))
    found.add_column("")
    for rank in range(ranks):
        found.add_column(str(rank) if few else "", justify="right")
    for source in range(ranks):
        row = [Text(str(source), style="bold")]
        for target in range(ranks):
            link = by_ends.get((source, target))
            if link is None:
                row.append(Text("·" if few else " ", style="dim"))
                continue
            shade = (link.speed - low) / (high - low) if high > low else 1.0
            text = f"{link.speed / 1e9:.2f}" if few else _SHADES[min(3, int(shade * 4))]
            bad = (source, target) in marked
            row.append(Text(text + ("!" if bad else ""), style="bold red" if bad else "green" if shade > 0.5 else ""))
        found.add_row(*row)
    return found


def _place(rank: int, hello: Hello | None) -> str:
    if hello is None or len(hello.nodes) < 2 or rank >= len(hello.hosts):
        return f"rank {rank}"
    return f"rank {rank} ({hello.hosts[rank]})"
