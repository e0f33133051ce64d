"""Output of benchmarks: tables, targets, failures, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.common.machine import MachineInfo
from benchmarks.common.targets import Target

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 120  # if standard output is not a terminal


def progress(title: str, text: str) -> None:
    """Print one line about a finished measurement to standard error."""
    sys.stderr.write(f"{title:<16}{text}\n")


def make_console() -> Console:
    """Return a console as wide as the terminal, or WIDTH columns for a file or pipe."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def make_table(title: str, left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """Return an empty table: columns `left` are aligned to the left, columns `right` to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def print_line(console: Console, label: str, text: str) -> None:
    """Print `text` after a label, as plain text on one line."""
    console.print(f"{label:<14}{text}", markup=False, highlight=False, soft_wrap=True)


def print_targets(console: Console, targets: Iterable[Target]) -> None:
    """Print one line per target."""
    for target in targets:
        print_line(console, target.status, f"{target.what}: {target.evidence}")


def write_json(path: str, benchmark: str, machine: MachineInfo, results: Mapping[str, Any]) -> None:
    """Write the results of a benchmark to `path`, unless that is empty."""
    if not path:
        return
    data = {"benchmark": benchmark, "machine": machine_data(machine), **results}
    with open(path, "w") as file:
        file.write(json.dumps(data, indent=1) + "\n")


def machine_data(machine: MachineInfo) -> dict[str, Any]:
    """Return the machine as JSON has it, with its load now."""
    return {**asdict(machine), "load_after": os.getloadavg()}
