"""The table of all links between ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.comm.results import Link, slow_links

if TYPE_CHECKING:
    from rich.table import Table

_FEW = 16  # ranks up to which every link is shown as a number, else as a shade
_SHADES = "░▒▓█"


def link_table(links: Sequence[Link]) -> Table:
    """Return the bandwidths of one backend: rows send, columns receive."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ranks, backend = links[0].ranks, links[0].backend
    by_ends = {(link.source, link.target): link for link in links}
    marked = {(one.link.source, one.link.target) for one in slow_links(links)}
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
