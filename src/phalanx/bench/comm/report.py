"""What becomes of results: tables, JSON, pictures, an earlier run beside, and the exit code."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from phalanx.bench import machine
from phalanx.bench.comm import comparison, links, plots, promises, tables
from phalanx.bench.comm.cells import Cell, Results
from phalanx.bench.comm.settings import Settings
from phalanx.bench.machine import Machine
from phalanx.errors import OptionError


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what becomes of it")
    group.add_argument("--details", action="store_true", help="a line for every backend, though there are several")
    group.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    group.add_argument(
        "--plot", default="", metavar="FILE", help="draw them; the links in FILE-links (needs matplotlib)"
    )
    group.add_argument("--compare", default="", metavar="FILE", help="JSON of an earlier run, beside this one")


def check(options: argparse.Namespace) -> None:
    """Before anything is measured for nothing."""
    if options.compare:
        comparison.read(options.compare)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot cannot be drawn: matplotlib is not installed", fix="pip install 'phalanx[bench]'")
    if options.plot and not options.plot.endswith(plots.ENDINGS):
        raise OptionError(f"--plot {options.plot}: expected {', '.join(plots.ENDINGS)}", fix="--plot comm.png")
    for name in ("json", "plot"):
        folder = os.path.dirname(os.path.abspath(getattr(options, name)))
        if getattr(options, name) and not os.access(folder, os.W_OK):
            raise OptionError(
                f"--{name} {getattr(options, name)} cannot be written", details=[f"{folder} is no folder to write in"]
            )


def about(settings: Settings) -> tuple[Machine, Settings]:
    return machine.machine(), settings


def finish(results: Results, options: argparse.Namespace, measured: tuple[Machine, Settings]) -> int:
    """1: something was wrong, or nothing came of it, or a promise was not kept."""
    judged = promises.targets(results)
    changes = []
    if options.compare:
        before, where = comparison.read(options.compare)
        changes = comparison.compare(results.cells, before)
        _differs(where, asdict(measured[0]))
        if not changes:
            sys.stderr.write(f"{options.compare} has measured nothing that this run has\n")
    tables.show(results, judged, changes, details=options.details)
    load, cores = measured[0].load_before[0], measured[0].cores
    if load > 0.5 * cores:
        sys.stderr.write(f"{cores} cores had a load of {load:.1f} before: others' work is in these numbers\n")
    if options.json:
        data = _data(results, measured)
        data["targets"] = [asdict(target) for target in judged]
        data["changes"] = [
            {**_names(one.cell), "before": one.before, "ratio": one.ratio, "noise": one.noise, "word": one.word}
            for one in changes
        ]
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    if options.plot:
        for path in plots.draw(results, options.plot):
            sys.stderr.write(f"written: {path}\n")
    return 1 if results.wrong or not results.measured or any(target.met is False for target in judged) else 0


def _data(results: Results, measured: tuple[Machine, Settings]) -> dict[str, Any]:
    before, settings = measured
    cells = []
    for cell in results.cells:
        one = msgspec.to_builtins(cell)
        if cell.rounds:
            one |= {"seconds": cell.seconds, "algorithm": cell.algorithm, "bus": cell.bus, "share": results.share(cell)}
        cells.append(one)
    return {
        "benchmark": "comm",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": asdict(settings),
        "ranks": msgspec.to_builtins(results.hellos),
        "cells": cells,
        "links": msgspec.to_builtins(results.links),
        "slow": [msgspec.to_builtins(one.link) for one in links.slow(results.links)],
        "steps": msgspec.to_builtins(results.steps),
        "notes": msgspec.to_builtins(results.notes),
    }


def _names(cell: Cell) -> dict[str, Any]:
    names = ("ranks", "operation", "dtype", "place", "size", "backend")
    return {name: getattr(cell, name) for name in names}


def _differs(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    told = [
        f"{name} {then.get(name)} then, {now.get(name)} now"
        for name in ("cpu", "cores", "torch", "kernel")
        if then.get(name) != now.get(name)
    ]
    if told:
        sys.stderr.write(f"the earlier run was on another machine: {'; '.join(told)}\n")
