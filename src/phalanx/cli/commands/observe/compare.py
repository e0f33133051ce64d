"""`phalanx compare RUN RUN …`: compares the loss and throughput of runs, in the terminal and as an image."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from phalanx.cli import output_file, run_lookup
from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.visible import visible_line
from phalanx.errors import UsageError
from phalanx.launcher.runs import history
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.watch.charts import plot, svg
from phalanx.watch.html import comparison
from phalanx.watch.html.comparison import ComparedRun, ComparedRunBuilder, ComparisonCell

SIGN = "phalanx compare"
_COLORS = (36, 33, 32, 35, 34, 31)  # terminal colors, in the order of the runs
_HIGH = {True: 15, False: 10}  # rows of a chart: True for the metric, False for a rate
_MOST = 160  # maximum columns


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `phalanx compare`."""
    parser = argparse.ArgumentParser(
        prog="phalanx compare",
        description="Compare loss and throughput of runs, as charts and a table. Runs may be running or ended.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="name from `phalanx ps --all`, or a run folder")
    parser.add_argument("--metric", default="loss", metavar="NAME", help="metric to compare (default: loss)")
    parser.add_argument("--over", choices=("step", "time"), default="step", help="x axis (default: step)")
    parser.add_argument("--log", action="store_true", help="use a logarithmic scale for the metric")
    parser.add_argument("--svg", metavar="FILE", help="also write an image")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite a FILE that phalanx did not write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Run `phalanx compare`. Return the exit code."""
    options = make_parser().parse_args(argv)
    records = [history.leader_record(run_lookup.find(name, verb="compare")) for name in options.runs]
    names = _names(records)
    compared = []
    for name, record in zip(names, records, strict=True):
        builder = ComparedRunBuilder(name, metric=options.metric)
        history.read(record, builder.apply)
        compared.append(builder.build(record.state))
    _check(compared, options.metric)
    if options.svg:
        charts = [
            comparison.chart(compared, name, over=options.over, log=options.log) for name in comparison.shown(compared)
        ]
        picture = svg.picture(charts, comment=SIGN)
        where = output_file.write(options.svg, picture, marker=SIGN, force=options.force, what="picture")
    if options.json:
        sys.stdout.write(json.dumps(_object(compared, options.metric)) + "\n")
        return 0
    _show(compared, over=options.over, log=options.log)
    if options.svg:
        sys.stdout.write(f"\nimage: {where}\n")
    return 0


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return unique names, even if a run is compared with itself."""
    names: list[str] = []
    for record in records:
        name = record.id if record.id not in names else os.path.basename(record.folder)
        again = (f"{name} ({number})" for number in range(2, len(records) + 1))
        names.append(name if name not in names else next(one for one in again if one not in names))
    return names


def _check(compared: Sequence[ComparedRun], metric: str) -> None:
    if metric != "loss" and all(run.final is None for run in compared):
        known = sorted({name for run in compared for name in run.known})
        raise UsageError(
            f"none of these runs has measured {metric}",
            details=[f"there is: {', '.join(known) or 'nothing'}"],
            fix=f"--metric {known[0]}" if known else "leave --metric out: every run with steps has a throughput",
        )


def _object(compared: Sequence[ComparedRun], metric: str) -> dict[str, Any]:
    runs = []
    for run in compared:
        fields = {**asdict(run), "known": run.known}
        fields["curves"] = {name: fields["curves"][name] for name in comparison.shown([run])}
        for name in ("final", "lowest", "highest"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = str(fields[name])  # not a JSON number
        runs.append(fields)
    return {"metric": metric, "runs": runs, "ratios": _ratios(compared)}


def _ratios(compared: Sequence[ComparedRun]) -> dict[str, list[float | None]]:
    """Return the ratio of each value to that of the first run."""
    return {
        name: [1.0, *(cell.ratio for cell in cells[1:])]
        for name, cells in comparison.table(compared)
        if any(cell.ratio is not None for cell in cells)
    }


def _show(compared: Sequence[ComparedRun], *, over: comparison.Over, log: bool) -> None:
    out = sys.stdout
    width = min(_MOST, os.get_terminal_size(out.fileno()).columns or 100) if out.isatty() else 100
    colored = out.isatty() and not environment().get("NO_COLOR") and environment().get("TERM") != "dumb"
    # Without colors, the dotted curves of all runs look the same.
    ascii_only = "utf" not in (out.encoding or "").lower() or (not colored and len(compared) > 1)
    letters = [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(compared))]

    def paint(text: str, style: int) -> str:
        color = _COLORS[style % len(_COLORS)] if style >= 0 else 0
        return f"\x1b[{color}m{text}\x1b[0m" if colored and color and text.strip() else text

    for index, run in enumerate(compared):
        sign = plot.sign(index, ascii_only=ascii_only)
        missing = (
            ""
            if run.final is not None or run.metric not in comparison.shown(compared)
            else (f"   (no {run.metric} was measured)")
        )
        out.write(paint(f"{sign} {letters[index]}", index) + f"  {visible_line(f'{run.run}{missing}')}\n")
    names = comparison.shown(compared)
    if compared[0].metric not in names:
        out.write(f"\nno {compared[0].metric} was measured in {'either' if len(compared) == 2 else 'any'} of them\n")
    if not names:
        out.write("their speed is not known either: no steps were recorded\n")
    for name in names:
        chart = comparison.chart(compared, name, over=over, log=log)
        rows = plot.lines(
            chart.series,
            width,
            _HIGH[name not in comparison.RATES],
            ascii_only=ascii_only,
            log=chart.log,
            zero=chart.zero,
            over=chart.over,
        )
        out.write(f"\n{visible_line(name)} over {'steps' if over == 'step' else 'time'}\n")
        for row in rows:
            out.write("".join(paint(text, style) for text, style in row).rstrip() + "\n")
    out.write("\n" + "\n".join(_table(compared, letters)) + "\n")


def _table(compared: Sequence[ComparedRun], letters: Sequence[str]) -> list[str]:
    found = comparison.table(compared)
    rows = [("", *letters), *((visible_line(name), *map(_cell_text, cells)) for name, cells in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(compared) + 1)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell_text(cell: ComparisonCell) -> str:
    text = visible_line(cell.text)
    return text if cell.ratio is None else f"{text} ({cell.ratio:.2f}x)"
