"""Plots of the figures in docs/benchmarks.md: a plot shows what the table says."""

from __future__ import annotations

import os
import re
from typing import Any

from benchmarks.common.paths import ROOT

COLORS = {"torchrun": "#c0504d", "accelerate launch": "#e6a817", "phalanx": "#4a78c9", "phalanx, warm": "#4c9f70"}


def table(title: str, number: int = 0) -> list[list[str]]:
    """Return the cells of a table of docs/benchmarks.md: the `number`th one below the heading `title`."""
    with open(os.path.join(ROOT, "docs", "benchmarks.md")) as file:
        text = file.read()
    below = text.partition(f"# {title}")[2]
    if not below:
        raise ValueError(f"docs/benchmarks.md has no heading {title!r}")
    tables = re.findall(r"(?:^\|.*\n)+", below, re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[number].strip().splitlines()]
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def value(cell: str) -> float:
    """Return the first number of a cell: the median."""
    found = re.search(r"\d+(?:\.\d+)?", cell)
    if found is None:
        raise ValueError(f"no number in {cell!r}")
    return float(found[0])


def launch(file: str) -> None:
    """Draw seconds until the first all_reduce and the first step, by number of ranks."""
    head, *rows = table("Seconds until the last rank has reached the end point")
    ranks = [int(value(cell)) for cell in head[2:]]
    pyplot = _pyplot()
    figure, both = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for axes, end in zip(both, ("all_reduce", "AdamW step"), strict=True):
        for name, _, *cells in (row for row in rows if row[1] == end):
            axes.plot(range(len(ranks)), [value(cell) for cell in cells], "o-", label=name, color=COLORS[name])
        axes.set_xticks(range(len(ranks)), ranks)
        axes.set_title(f"from the command to the first {end}", fontsize=10)
        axes.set_xlabel("ranks")
        axes.set_ylabel("seconds")
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
    both[0].legend(frameon=False, fontsize=9)
    _save(figure, file)


def recover(file: str) -> None:
    """Draw seconds from the kill of a rank to the next step of all ranks."""
    head, *rows = table("Recover: what a dead rank costs")
    column = next(number for number, title in enumerate(head) if title.startswith("next step"))
    names = [re.sub(r"[`*]", "", row[0]) for row in rows]
    seconds = [value(row[column].replace("*", "")) for row in rows]
    figure, axes = _pyplot().subplots(figsize=(9, 2.4))
    colors = [COLORS["phalanx"] if name.startswith("phalanx") else COLORS["torchrun"] for name in names]
    bars = axes.barh(names, seconds, color=colors)
    axes.bar_label(bars, labels=[f"{second:g} s" for second in seconds], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("seconds from kill -9 of one of 4 ranks to the next step of all ranks")
    axes.set_xlim(0, max(seconds) * 1.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _save(figure, file)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, file: str) -> None:
    figure.savefig(file, dpi=110, bbox_inches="tight")
    _pyplot().close(figure)
