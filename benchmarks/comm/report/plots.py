"""Plots: bus bandwidth by size for every operation, and the links between ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.comm.results import CommResults, Link, slow_links
from benchmarks.comm.traffic import COPY, format_size

# Distinguishable with colour blindness.
_COLOURS = ("#0072b2", "#e69f00", "#222222", "#cc79a7", "#009e73", "#d55e00")
_LINES = ("-", "--", ":", "-.")
ENDINGS = (".png", ".svg", ".pdf")


def draw(results: CommResults, path: str) -> list[str]:
    """Draw the results to `path`, and the links to a second file; return what was written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    written = []
    sized = [
        measurement
        for measurement in results.measurements
        if measurement.size and measurement.rounds and measurement.operation != COPY
    ]
    if sized:
        figure = _curves(pyplot, results)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        written.append(path)
    groups: dict[tuple[int, str], list[Link]] = {}
    for link in results.links:
        groups.setdefault((link.ranks, link.backend), []).append(link)
    if groups:
        name, ending = os.path.splitext(path)
        target = f"{name}-links{ending}" if sized else path
        figure = _matrices(pyplot, list(groups.values()))
        figure.savefig(target, dpi=130)
        pyplot.close(figure)
        written.append(target)
    return written


def _curves(pyplot: Any, results: CommResults) -> Any:
    measurements = [
        measurement
        for measurement in results.measurements
        if measurement.size and measurement.rounds and measurement.operation != COPY
    ]
    operations = list(dict.fromkeys(measurement.operation for measurement in measurements))
    backends = list(dict.fromkeys(measurement.backend for measurement in measurements))
    ranks = list(dict.fromkeys(measurement.ranks for measurement in measurements))
    columns = min(4, len(operations))
    rows = math.ceil(len(operations) / columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 2.9 * rows + 0.6), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for panel in panels.flat[len(operations) :]:
        panel.set_visible(False)
    for panel, operation in zip(panels.flat, operations, strict=False):
        for backend in backends:
            for count in ranks:
                of = [
                    measurement
                    for measurement in measurements
                    if (measurement.operation, measurement.backend, measurement.ranks) == (operation, backend, count)
                ]
                of = sorted(
                    (
                        measurement
                        for measurement in of
                        if measurement.dtype == of[0].dtype and measurement.place == of[0].place
                    ),
                    key=lambda measurement: measurement.size,
                )
                if of:
                    look = {"color": _COLOURS[backends.index(backend) % 6], "linestyle": _LINES[ranks.index(count) % 4]}
                    (line,) = panel.plot(
                        [measurement.size for measurement in of],
                        [measurement.bus / 1e9 for measurement in of],
                        marker="o",
                        markersize=3,
                        **look,
                    )
                    handles[f"{backend}, {count} ranks"] = line
        sizes = sorted({measurement.size for measurement in measurements})
        panel.set_title(operation, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [format_size(size).replace("iB", "").replace(" ", "") for size in sizes], fontsize=7)
        panel.minorticks_off()
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("bus bandwidth, GB/s", fontsize=10)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)), frameon=False
    )
    return figure


def _matrices(pyplot: Any, groups: Sequence[Sequence[Link]]) -> Any:
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(3.8 * len(groups) + 0.6, 3.9), squeeze=False, layout="constrained"
    )
    for panel, of in zip(panels.flat, groups, strict=True):
        ranks = of[0].ranks
        speeds = [[math.nan] * ranks for _ in range(ranks)]
        for link in of:
            speeds[link.source][link.target] = link.speed / 1e9
        image = panel.imshow(speeds, cmap="viridis", vmin=0)
        figure.colorbar(image, ax=panel, shrink=0.7, label="GB/s")
        most = max(link.speed for link in of)
        if ranks <= 16:
            for link in of:
                text = f"{link.speed / 1e9:.1f}"
                colour = "black" if link.speed > 0.7 * most else "white"  # contrasts with the background
                panel.text(link.target, link.source, text, ha="center", va="center", color=colour, fontsize=7)
        for one in slow_links(of):
            at = (one.link.target - 0.5, one.link.source - 0.5)
            panel.add_patch(pyplot.Rectangle(at, 1, 1, fill=False, edgecolor="red", linewidth=2.5))
        panel.set_title(f"{of[0].backend}, {ranks} ranks", fontsize=10)
        panel.set_xlabel("to rank")
        panel.set_ylabel("from rank")
        step = max(1, ranks // 16)
        panel.set_xticks(range(0, ranks, step))
        panel.set_yticks(range(0, ranks, step))
    return figure
