"""What do viewers cost a run, and how fast do they show it?

cost: overhead.py, a training with and without a viewer, in turn.
page: page.py, the page of a run with many ranks, in Chromium.
updates: model_update.py, what a second of events of many ranks costs a viewer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.common import output
from benchmarks.common.machine import machine_info
from benchmarks.common.options import choices
from benchmarks.common.targets import Target, any_missed
from benchmarks.watch import model_update, overhead, page
from benchmarks.watch.model_update import ModelUpdateCost
from benchmarks.watch.overhead import CASES, LABELS, ViewerCost, WatchResult, WindowSettings
from benchmarks.watch.page import PageSample
from phalanx.errors import OptionError

PARTS = {
    "cost": "time of a step with and without a viewer",
    "page": "first paint, latency from event to pixel, frames while scrolling",
    "updates": "the work of one second of events",
}


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench watch` and return its exit code."""
    options = _parser().parse_args(argv)
    parts = choices("--only", options.only, PARTS)
    cases = [CASES[name] for name in choices("--cases", options.cases, CASES)]
    if options.rounds < 1 or options.seconds <= 0 or options.times < 1 or options.ranks < 1:
        raise OptionError(
            "--rounds, --seconds, --times and --ranks must be positive",
            fix="--rounds 12 --seconds 2 --times 5 --ranks 512",
        )
    before = machine_info()
    results: list[WatchResult] = []
    pages: list[PageSample] = []
    updates: list[ModelUpdateCost] = []
    if "cost" in parts:
        windows = WindowSettings(options.rounds, options.seconds, options.settle)
        results = overhead.measure_all(cases, windows, inherited)
    if "page" in parts:
        pages = page.measure_safely(options.ranks, options.times, options.seconds, inherited)
    if "updates" in parts:
        updates = [model_update.measure(ranks) for ranks in (8, options.ranks)]
    costs = [cost for one in results for cost in overhead.costs(one)]
    judged = overhead.targets(costs, before.cores) + (page.targets(pages) if pages else [])
    data = {
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "cases": [asdict(one) for one in results],
        "costs": [asdict(one) for one in costs],
        "pages": [asdict(one) for one in pages],
        "updates": [asdict(one) for one in updates],
        "targets": [asdict(one) for one in judged],
    }
    output.write_json(options.json, "watch", before, data)
    _show(costs, updates, judged)
    _show_first_request(results)
    failed = any(cost.failure for cost in costs)
    return 1 if failed or any_missed(judged) else 0


def _show(costs: Sequence[ViewerCost], updates: Sequence[ModelUpdateCost], judged: Sequence[Target]) -> None:
    console = output.make_console()
    good = [cost for cost in costs if not cost.failure]
    if good:
        title = "A training step with each viewer: medians. CPU: share of one core"
        columns = ("ms", "longer", "ranks' CPU", "agent CPU", "viewer CPU", "kB/s")
        table = output.make_table(title, ("case", "ranks", "viewer"), columns)
        for cost in good:
            compared = [
                "" if cost.viewer == "off" else f"{more:+.2%} ± {error:.2%}"
                for more, error in ((cost.more, cost.error), (cost.computing, cost.computing_error))
            ]
            shares = (f"{cost.agent:.2%}", f"{cost.viewer_cpu:.2%}", f"{cost.sent / 1000:.1f}")
            step = f"{cost.milliseconds:.3f}"
            table.add_row(cost.case, str(cost.ranks), LABELS[cost.viewer], step, *compared, *shares)
        console.print(table)
    if updates:
        times_of = ("publish ms", "read ms", "apply ms", "update ms", "complete ms")
        sizes_of = ("events kB", "update kB", "complete kB")
        table = output.make_table("The work of one second of events", (), ("ranks", *times_of, *sizes_of))
        for one in updates:
            times = (f"{seconds * 1000:.2f}" for seconds in (one.publish, one.read, one.apply, one.update, one.whole))
            sizes = (f"{size / 1000:.1f}" for size in (one.line, one.sent, one.sent_whole))
            table.add_row(str(one.ranks), *times, *sizes)
        console.print(table)
    output.print_targets(console, judged)


def _show_first_request(results: Sequence[WatchResult]) -> None:
    times = [one.opened for one in results if one.opened is not None]
    if times:
        text = ", ".join(f"{seconds:.2f} s" for seconds in times)
        sys.stdout.write(f"The first request for the page of `phalanx run` waits for its server to start: {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench watch",
        description="What viewers in a terminal and in a browser cost a run, and how fast the page of many ranks is.",
        epilog="parts: " + "; ".join(f"{name}: {what}" for name, what in PARTS.items()),
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help=f"parts: {', '.join(PARTS)} (all)")
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help=f"cases: {', '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="windows of each viewer (12)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="seconds per window (2)")
    parser.add_argument("--settle", type=float, default=0.5, metavar="S", help="seconds before each window (0.5)")
    parser.add_argument("--ranks", type=int, default=512, metavar="N", help="simulated ranks of the page (512)")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="openings of the page (5)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser
