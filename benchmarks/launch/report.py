"""The report of `phalanx bench launch`: tables on the terminal, JSON, Markdown, a plot."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.machine import Load, MachineInfo
from benchmarks.common.output import make_console, make_table, print_line
from benchmarks.launch.results import ENDS, LaunchResults, LaunchTimes, targets

FILES = ("launch.json", "launch.md", "launch.png")

TableRow = list[str]

# Distinguishable with colour blindness; the markers distinguish them without colour.
_LOOKS = {
    "phalanx": {"color": "#0072b2", "marker": "o"},
    "warm": {"color": "#e69f00", "marker": "s"},
    "torchrun": {"color": "#222222", "marker": "^"},
    "accelerate": {"color": "#cc79a7", "marker": "v"},
}


class LaunchReport:
    """Results of `phalanx bench launch`, in every form."""

    def __init__(self, results: LaunchResults, machine: MachineInfo, load_after: Load) -> None:
        self._results = results
        self._machine = machine
        self._load_after = load_after
        self._ranks = results.settings.ranks

    def save(self, folder: str) -> list[str]:
        """Write all files to `folder`; return their paths."""
        os.makedirs(folder, exist_ok=True)
        data, page, plot = (os.path.join(folder, name) for name in FILES)
        for path, text in ((data, self.json()), (page, self.markdown())):
            with open(path, "w") as file:
                file.write(text)
        if importlib.util.find_spec("matplotlib") is None:
            sys.stderr.write(f"{plot} is not drawn: pip install -e '.[bench]'\n")
            return [data, page]
        self._plot(plot)
        return [data, page, plot]

    # -- JSON

    def json(self) -> str:
        """Return all samples, medians and targets as JSON."""
        results = self._results
        cells = [self._summary(contender, end, ranks) for contender, end in self._rows() for ranks in self._ranks]
        data = {
            "benchmark": "launch",
            "machine": {**asdict(self._machine), "load_after": self._load_after},
            "settings": asdict(results.settings),
            "import_torch": [_flat(asdict(sample)) for sample in results.imports],
            "samples": [_flat(asdict(sample)) for sample in results.samples],
            "cells": cells,
            "targets": [asdict(target) for target in targets(results)],
        }
        return json.dumps(data, indent=1) + "\n"

    def _summary(self, contender: str, end: str, ranks: int) -> dict[str, Any]:
        cell = self._results.times(contender, end, ranks)
        return {
            "contender": contender,
            "end": end,
            "ranks": ranks,
            "median": cell.median,
            "min": min(cell.times, default=None),
            "max": max(cell.times, default=None),
            "failed": cell.failed,
            "total_median": self._results.times(contender, end, ranks, total=True).median,
            "torchrun_takes": self._advantage(contender, end, ranks),
        }

    # -- tables

    def _rows(self) -> Iterator[tuple[str, str]]:
        settings = self._results.settings
        for end in ENDS:
            for name in LAUNCHERS:
                if end in settings.ends and name in settings.contenders:
                    yield name, end

    def _advantage(self, contender: str, end: str, ranks: int) -> float | None:
        """How many times as long torchrun takes."""
        ours = self._results.times(contender, end, ranks).median
        theirs = self._results.times("torchrun", end, ranks).median
        return None if ours is None or theirs is None else round(theirs / ours, 3)

    def _table(self, entry: Callable[[str, str, int], str], *, without: str = "") -> tuple[TableRow, list[TableRow]]:
        """Header and rows: launcher and end point, then one column per number of ranks."""
        header = ["", "until the first", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in self._ranks)]
        rows = [
            [
                LAUNCHERS[name].label,
                ENDS[end].removeprefix("first "),
                *(entry(name, end, ranks) for ranks in self._ranks),
            ]
            for name, end in self._rows()
            if name != without
        ]
        return header, rows

    def _tables(self, text: Callable[[LaunchTimes], str]) -> Iterator[tuple[str, TableRow, list[TableRow]]]:
        results = self._results

        def times(name: str, end: str, ranks: int) -> str:
            return text(results.times(name, end, ranks))

        def totals(name: str, end: str, ranks: int) -> str:
            return text(results.times(name, end, ranks, total=True))

        def ratios(name: str, end: str, ranks: int) -> str:
            ratio = self._advantage(name, end, ranks)
            return "-" if ratio is None else f"{ratio:.1f}x"

        yield "Seconds until the last rank has reached the end point: median (min..max)", *self._table(times)
        if {"torchrun"} < set(results.settings.contenders):
            yield "torchrun takes this many times as long", *self._table(ratios, without="torchrun")
        yield "Seconds until the launcher has exited", *self._table(totals)

    def show(self) -> None:
        """Print the tables and targets to the terminal."""
        console = make_console()
        side = int(console.width >= 100)
        for title, header, rows in self._tables(stacked):
            table = make_table(title)
            table.padding = (0, side)
            for number, name in enumerate(header):
                table.add_column(name, justify="right" if number > 1 else "left", no_wrap=number > 1, min_width=10)
            for before, row in zip([None, *rows], rows, strict=False):
                if before is not None and before[1] != row[1]:
                    table.add_section()
                table.add_row(*row)
            console.print(table)
        import_time = spread(self._results.import_times)
        console.print(f"One `import torch` in a fresh interpreter: {import_time} s\n", highlight=False)
        for line in self._warnings():
            console.print(f"[yellow]{line}[/]\n", highlight=False)
        for target in targets(self._results):
            colour = {True: "green", False: "red", None: "yellow"}[target.met]
            text = f"[{colour}]{target.status:<14}[/]{target.what}: {target.evidence}"
            console.print(text, highlight=False, soft_wrap=True)
        for line in self._failures():
            print_line(console, "failed", line)

    def _warnings(self) -> list[str]:
        load, cores = self._machine.load_before[0], self._machine.cores
        if load < cores / 4:
            return []
        # Other load slows several processes that import torch differently than a single fork server.
        return [
            f"This machine was busy before the first launch (load average {load:.1f}, {cores} cores): times are longer "
            "than on an idle machine, and their ratios may differ."
        ]

    def _failures(self) -> list[str]:
        return [
            f"{case.contender}, {case.end}, {case.ranks} ranks, round {sample.round}: {sample.failure}"
            for sample in self._results.failures
            for case in [sample.case]
        ]

    # -- markdown

    def markdown(self) -> str:
        """Return the report as a section of docs/benchmarks.md."""
        facts, settings = self._machine, self._results.settings
        lines = [
            "## Launch: from the command to the first collective and the first step",
            "",
            f"{facts.date}. {facts.cpu}, {facts.cores} cores, {facts.memory_gib} GiB, {facts.kernel}; "
            f"Python {facts.python}, torch {facts.torch}, accelerate {facts.accelerate}, phalanx {facts.phalanx}. "
            f"Load average {facts.load_before[0]:.1f} before, {self._load_after[0]:.1f} after.",
            "",
            "Gloo on the CPU, one thread per rank. In each round every launcher starts the same script once for every "
            f"number of ranks, in an order that rotates; rounds: {settings.repeat}. Times are from just before the "
            "start of the launcher until the *last* rank has passed the end point.",
            "",
            f"One `import torch` in a fresh interpreter takes {spread(self._results.import_times)} s here.",
            "",
            *(f"{line}\n" for line in self._warnings()),
            f"![seconds by number of ranks]({FILES[2]})",
        ]
        for title, header, rows in self._tables(spread):
            lines += ["", f"### {title}", "", _line(header), _line(["---", "---", *["--:"] * len(self._ranks)])]
            lines += [_line(row) for row in rows]
        lines += ["", "### Targets", "", _line(["target", "measured", ""]), _line(["---"] * 3)]
        lines += [_line([target.what, target.evidence, target.status]) for target in targets(self._results)]
        if self._results.failures:
            lines += ["", "### Launches that failed", "", *(f"- {line}" for line in self._failures())]
        words = [f"--ranks {','.join(map(str, settings.ranks))}", f"--repeat {settings.repeat}"]
        words += [f"--contenders {','.join(settings.contenders)}", f"--end {','.join(settings.ends)}"]
        lines += ["", f"Command: `phalanx bench launch {' '.join(words)}`"]
        return "\n".join(lines) + "\n"

    # -- plot

    def _plot(self, path: str) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        ends = [end for end in ENDS if end in self._results.settings.ends]
        figure, panels = pyplot.subplots(
            1, len(ends), figsize=(5.6 * len(ends), 4.6), sharey=True, squeeze=False, layout="constrained"
        )
        for panel, end in zip(panels[0], ends, strict=True):
            self._draw(panel, end)
        self._scale(panels[0][0])
        panels[0][-1].legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
        facts, rounds = self._machine, self._results.settings.repeat
        title = f"gloo, {facts.cores} cores, torch {facts.torch}; median, min and max of {rounds}"
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)

    def _draw(self, panel: Any, end: str) -> None:
        for name in (name for name, of in self._rows() if of == end):
            cells = [(ranks, self._results.times(name, end, ranks)) for ranks in self._ranks]
            known = [(ranks, cell.times, cell.median) for ranks, cell in cells if cell.median is not None]
            middles = [median for _, _, median in known]
            panel.errorbar(
                [ranks for ranks, _, _ in known],
                middles,
                yerr=[
                    [median - min(times) for _, times, median in known],
                    [max(times) - median for _, times, median in known],
                ],
                label=LAUNCHERS[name].label,
                linewidth=1.8,
                markersize=5,
                capsize=3,
                **_LOOKS[name],
            )
        if self._results.import_times.median is not None:
            panel.axhline(self._results.import_times.median, color="#888888", linestyle=":", label="one import torch")
        panel.set_title(f"until the {ENDS[end]}", fontsize=11)
        panel.set_xlabel("ranks")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(self._ranks, [str(ranks) for ranks in self._ranks])
        panel.set_xlim(min(self._ranks) / 1.3, max(self._ranks) * 1.3)
        panel.minorticks_off()
        panel.grid(axis="y", color="#dddddd", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)

    def _scale(self, panel: Any) -> None:
        """Set up the shared axis: plain numbers instead of powers of ten, and space above for the legend."""
        low, high = min(0.9, panel.get_ylim()[0]), panel.get_ylim()[1] * 2.5
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
        panel.set_ylim(low, high)
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.set_ylabel("seconds from the command")


def spread(times: LaunchTimes) -> str:
    """Return `median (min..max)`, and how many launches failed."""
    failed = f"{times.failed} of {times.failed + len(times.times)} failed" if times.failed else ""
    if times.median is None:
        return failed or "-"
    text = seconds(times.median)
    if len(times.times) > 1:
        text += f" ({seconds(min(times.times))}..{seconds(max(times.times))})"
    return f"{text}, {failed}" if failed else text


def stacked(times: LaunchTimes) -> str:
    """Return the same as `spread`, on several lines for a narrow column."""
    return spread(times).replace(" (", "\n").replace(")", "").replace(", ", "\n").replace(" failed", "\nfailed")


def seconds(time: float) -> str:
    """Return a time with two decimals below ten seconds, else with one."""
    return f"{time:.2f}" if time < 9.995 else f"{time:.1f}"


def _flat(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample.pop("case"), **sample}


def _line(cells: TableRow) -> str:
    return f"| {' | '.join(cells)} |"
