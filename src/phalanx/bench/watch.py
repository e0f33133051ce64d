"""What does it cost a run to be looked at, and how soon is something to be seen?

cost: looking.py, a training with an onlooker and without, in turns.
page: panorama.py, the page of a run with many ranks, in a real Chromium.
fold: fold.py, what a second of a run with many ranks takes those who look at it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from phalanx.bench import fold, looking, machine, panorama
from phalanx.bench.fold import Fold
from phalanx.bench.launch import chosen
from phalanx.bench.looking import CASES, LABELS, Cost, Pace, Seen
from phalanx.bench.panorama import Panorama
from phalanx.bench.report import verdict
from phalanx.bench.results import Target
from phalanx.errors import OptionError

PARTS = {
    "cost": "steps a second, looked at and not",
    "page": "first paint, event to pixel, frames while scrolling",
    "fold": "the work of a second of events",
}


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    parts = chosen("--only", options.only, PARTS)
    cases = [CASES[name] for name in chosen("--cases", options.cases, CASES)]
    if options.rounds < 1 or options.seconds <= 0 or options.times < 1 or options.ranks < 1:
        raise OptionError("too little to tell anything", fix="--rounds 12 --seconds 2 --times 5 --ranks 512")
    if options.pictures:
        from phalanx.bench import pictures

        return pictures.take(options.pictures, inherited)
    before = machine.machine()
    seen: list[Seen] = []
    pages: list[Panorama] = []
    folds: list[Fold] = []
    if "cost" in parts:
        seen = looking.measured(cases, Pace(options.rounds, options.seconds, options.settle), inherited)
    if "page" in parts:
        pages = panorama.measured(options.ranks, options.times, options.seconds, inherited)
    if "fold" in parts:
        folds = [fold.measure(ranks) for ranks in (8, options.ranks)]
    costs = [cost for one in seen for cost in looking.costs(one)]
    judged = looking.targets(costs, before.cores) + (panorama.targets(pages) if pages else [])
    data = {
        "benchmark": "watch",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": {name: value for name, value in vars(options).items() if name not in ("json", "pictures")},
        "seen": [asdict(one) for one in seen],
        "costs": [asdict(one) for one in costs],
        "pages": [asdict(one) for one in pages],
        "folds": [asdict(one) for one in folds],
        "targets": [asdict(one) for one in judged],
    }
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    _show(costs, folds, judged)
    _opened(seen)
    failed = any(cost.failure for cost in costs)
    return 1 if failed or any(target.met is False for target in judged) else 0


def _show(costs: Sequence[Cost], folds: Sequence[Fold], judged: Sequence[Target]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    good = [cost for cost in costs if not cost.failure]
    if good:
        title = "A training step, by who looks at it: medians. CPU: cores that are kept busy"
        columns = ("case", "ranks", "who looks", "ms", "longer", "ranks' CPU", "agent", "onlooker", "kB/s")
        table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="left" if name in ("case", "who looks") else "right")
        for cost in good:
            off = cost.who == "off"
            compared = [
                "" if off else f"{more:+.2%} ± {error:.2%}"
                for more, error in ((cost.more, cost.error), (cost.computing, cost.computing_error))
            ]
            shares = (f"{cost.agent:.2%}", f"{cost.onlooker:.2%}", f"{cost.sent / 1000:.1f}")
            step = f"{cost.milliseconds:.3f}"
            table.add_row(cost.case, str(cost.ranks), LABELS[cost.who], step, *compared, *shares)
        console.print(table)
    if folds:
        table = Table(title="A second of events: ms", title_justify="left", box=box.SIMPLE, pad_edge=False)
        for name in (
            "ranks",
            "publish",
            "read",
            "fold",
            "update",
            "whole page",
            "kB of events",
            "update",
            "whole page",
        ):
            table.add_column(name, justify="right")
        for one in folds:
            times = (f"{seconds * 1000:.2f}" for seconds in (one.publish, one.read, one.see, one.update, one.whole))
            table.add_row(str(one.ranks), *times, *(f"{size / 1000:.1f}" for size in (one.line, one.told, one.all)))
        console.print(table)
    for target in judged:
        console.print(f"{verdict(target):<14}{target.what}: {target.evidence}", highlight=False, soft_wrap=True)


def _opened(seen: Sequence[Seen]) -> None:
    times = [one.opened for one in seen if one.opened is not None]
    if times:
        text = ", ".join(f"{seconds:.2f} s" for seconds in times)
        sys.stdout.write(f"The first who opens the page of `phalanx run` waits for its server: {text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench watch",
        description="What it costs a run to be looked at, in a terminal and in a browser, and how soon a page of many "
        "ranks shows something.",
        epilog="parts: " + "; ".join(f"{name}: {what}" for name, what in PARTS.items()),
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="windows of each onlooker (12)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of a window (2)")
    parser.add_argument("--settle", type=float, default=0.5, metavar="S", help="before a window (0.5)")
    parser.add_argument("--ranks", type=int, default=512, metavar="N", help="of the page, simulated (512)")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="the page is opened so often (5)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--pictures", default="", metavar="DIR", help="measure nothing: put pictures of all there")
    return parser
