"""Writes results as tables, JSON and plots, compares them with an earlier run, and decides the exit code."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from benchmarks.comm.report import comparison, plots, tables, targets
from benchmarks.comm.results import CommResults, Measurement, slow_links
from benchmarks.comm.settings import CommSettings
from benchmarks.common.machine import MachineInfo
from benchmarks.common.output import write_json
from benchmarks.common.targets import any_missed
from phalanx.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the report to a parser."""
    group = parser.add_argument_group("results")
    group.add_argument("--details", action="store_true", help="one line per backend instead of backends side by side")
    group.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    group.add_argument(
        "--plot", default="", metavar="FILE", help="plot the results, and the links to FILE-links (needs matplotlib)"
    )
    group.add_argument("--compare", default="", metavar="FILE", help="compare with the JSON of an earlier run")


def check(options: argparse.Namespace) -> None:
    """Check the options of the report before anything is measured; OptionError for what cannot work."""
    if options.compare:
        comparison.read(options.compare)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot cannot be drawn: matplotlib is not installed", fix="pip install -e '.[bench]'")
    if options.plot and not options.plot.endswith(plots.ENDINGS):
        raise OptionError(f"--plot {options.plot}: expected {', '.join(plots.ENDINGS)}", fix="--plot comm.png")
    for name in ("json", "plot"):
        folder = os.path.dirname(os.path.abspath(getattr(options, name)))
        if getattr(options, name) and not os.access(folder, os.W_OK):
            raise OptionError(
                f"--{name} {getattr(options, name)} cannot be written", details=[f"{folder} is not a writable folder"]
            )


def finish(results: CommResults, options: argparse.Namespace, machine: MachineInfo, settings: CommSettings) -> int:
    """Report all results. The exit code is 1 if a result is wrong, nothing was measured, or a target was missed."""
    judged = targets.targets(results)
    changes = []
    if options.compare:
        before, where = comparison.read(options.compare)
        changes = comparison.compare(results.measurements, before)
        _warn_other_machine(where, asdict(machine))
        if not changes:
            sys.stderr.write(f"{options.compare} has no measurement in common with this run\n")
    tables.show(results, judged, changes, details=options.details)
    load, cores = machine.load_before[0], machine.cores
    if load > 0.5 * cores:
        sys.stderr.write(f"{cores} cores had a load of {load:.1f} before: other work affects these numbers\n")
    if options.json:
        data = _data(results, settings)
        data["targets"] = [asdict(target) for target in judged]
        data["changes"] = [
            {**_names(one.measurement), "before": one.before, "ratio": one.ratio, "noise": one.noise, "word": one.word}
            for one in changes
        ]
        write_json(options.json, "comm", machine, data)
    if options.plot:
        for path in plots.draw(results, options.plot):
            sys.stderr.write(f"written: {path}\n")
    return 1 if results.wrong or not results.measured or any_missed(judged) else 0


def _data(results: CommResults, settings: CommSettings) -> dict[str, Any]:
    measurements = []
    for measurement in results.measurements:
        one = msgspec.to_builtins(measurement)
        if measurement.rounds:
            one |= {
                "seconds": measurement.seconds,
                "algorithm": measurement.algorithm,
                "bus": measurement.bus,
                "share": results.share(measurement),
            }
        measurements.append(one)
    return {
        "settings": asdict(settings),
        "ranks": msgspec.to_builtins(results.worlds),
        "measurements": measurements,
        "links": msgspec.to_builtins(results.links),
        "slow": [msgspec.to_builtins(one.link) for one in slow_links(results.links)],
        "steps": msgspec.to_builtins(results.steps),
        "notes": msgspec.to_builtins(results.notes),
    }


def _names(measurement: Measurement) -> dict[str, Any]:
    names = ("ranks", "operation", "dtype", "place", "size", "backend")
    return {name: getattr(measurement, name) for name in names}


def _warn_other_machine(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = [
        f"{name} {then.get(name)} then, {now.get(name)} now"
        for name in ("cpu", "cores", "torch", "kernel")
        if then.get(name) != now.get(name)
    ]
    if differences:
        sys.stderr.write(f"the earlier run was on another machine: {'; '.join(differences)}\n")
