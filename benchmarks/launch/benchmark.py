"""How long from the command to the first all_reduce, and to the first training step, on N ranks?

A launch starts just before its process is created, and ends when the last rank has passed the end point. In every
round each launcher runs once for every number of ranks, in an order that rotates from case to case.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product

from benchmarks.common import launchers
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.machine import machine_info
from benchmarks.common.options import choices, positive_numbers
from benchmarks.common.ratios import rotated
from benchmarks.launch import runner
from benchmarks.launch.report import LaunchReport
from benchmarks.launch.results import ENDS, LaunchCase, LaunchResults, LaunchSettings
from phalanx.errors import OptionError


def schedule(settings: LaunchSettings, number: int) -> Iterator[LaunchCase]:
    """Yield the cases of one round. Launchers of the same case follow each other, so that they run under the same
    load.
    """
    for place, (end, ranks) in enumerate(product(settings.ends, settings.ranks)):
        for name in rotated(settings.contenders, number + place):
            yield LaunchCase(name, end, ranks)


def measure(settings: LaunchSettings, inherited: Mapping[str, str]) -> LaunchResults:
    """Run all rounds."""
    results = LaunchResults(settings)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        if "warm" in settings.contenders:
            stack.enter_context(launchers.kept_warm(LAUNCHERS["warm"], inherited, folder))
        for name, end in product(settings.contenders, settings.ends):
            # Fills the page cache, and lets phalanx learn the imports of the script.
            case = LaunchCase(name, end, min(settings.ranks))
            runner.report_progress("warm-up", runner.launch(case, 0, inherited, folder))
        for number in range(1, settings.repeat + 1):
            title = f"round {number} of {settings.repeat}"
            results.imports.append(runner.import_torch(number, inherited, folder))
            runner.report_progress(title, results.imports[-1])
            for case in schedule(settings, number):
                results.samples.append(runner.launch(case, number, inherited, folder))
                runner.report_progress(title, results.samples[-1])
    return results


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench launch` and return its exit code."""
    options = _parser().parse_args(argv)
    settings = LaunchSettings(
        ranks=positive_numbers("--ranks", options.ranks, "2,8"),
        repeat=options.repeat,
        contenders=choices("--contenders", options.contenders, LAUNCHERS),
        ends=choices("--end", options.end, ENDS),
    )
    if settings.repeat < 1:
        raise OptionError(f"--repeat {settings.repeat}: at least 1 is needed", fix="--repeat 5")
    for name in settings.contenders:
        launchers.check_installed(LAUNCHERS[name])
    before = machine_info()
    results = measure(settings, inherited)
    report = LaunchReport(results, before, os.getloadavg())
    paths = report.save(options.out)
    if options.json:
        sys.stdout.write(report.json())
    else:
        report.show()
        sys.stderr.write(f"written: {', '.join(paths)}\n")
    return 1 if results.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench launch",
        description="Time from the command to the first all_reduce and to the first AdamW step of a DDP model, "
        "gloo on the CPU, for phalanx and other launchers.",
    )
    parser.add_argument("--ranks", default="1,2,4,8,16", metavar="N,N", help="numbers of ranks (1,2,4,8,16)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (5)")
    names = ",".join(LAUNCHERS)
    parser.add_argument("--contenders", default=names, metavar="A,B", help=f"launchers to compare ({names})")
    parser.add_argument("--end", default=",".join(ENDS), metavar="A,B", help=f"end points ({','.join(ENDS)})")
    parser.add_argument("--out", default="bench-launch", metavar="DIR", help="folder for the results (./bench-launch)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    return parser
