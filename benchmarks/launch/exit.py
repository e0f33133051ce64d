"""How long from the last line of a script to the prompt, on N ranks?

Times are from the last rank's last line to the end of the launcher's process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks.common import launchers
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.machine import machine_info
from benchmarks.common.options import choices
from benchmarks.common.ratios import rotated
from benchmarks.common.targets import Target
from benchmarks.launch import runner
from benchmarks.launch.results import LaunchCase, LaunchSample
from phalanx.errors import OptionError

LIMIT = 0.4  # seconds, with 8 ranks
_MEASURED = ("phalanx", "warm", "torchrun")


@dataclass(frozen=True)
class ExitTimes:
    """All rounds of one launcher. Times are in seconds."""

    contender: str
    ranks: int
    times: tuple[float, ...]
    failures: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Median, minimum and maximum, and how many launches failed."""
        if not self.times:
            return f"failed: {self.failures[0]}"
        spread = f"{min(self.times):.2f}..{max(self.times):.2f}"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{statistics.median(self.times):.2f} s ({spread}){failed}"


def exit_times(samples: list[LaunchSample], contender: str, ranks: int) -> ExitTimes:
    """Return what one launcher took from the last line of its script to its end."""
    own = [sample for sample in samples if sample.case.contender == contender]
    times = [sample.total - sample.seconds for sample in own if sample.total is not None and sample.seconds is not None]
    failures = tuple(sample.failure for sample in own if sample.failure)
    return ExitTimes(contender, ranks, tuple(round(time, 4) for time in times), failures)


def target(exits: list[ExitTimes]) -> Target:
    """Judge the time of a cold phalanx run."""
    what = f"8 ranks: below {LIMIT:g} s"
    cold = next((found for found in exits if found.contender == "phalanx" and found.ranks == 8 and found.times), None)
    if cold is None or cold.failures:
        return Target(what, "not measured", None)
    median = statistics.median(cold.times)
    return Target(what, f"{median:.3f} s", median < LIMIT)


def measure(names: tuple[str, ...], ranks: int, repeat: int, inherited: Mapping[str, str]) -> list[ExitTimes]:
    """Run all rounds. Round 0 fills caches and is not counted."""
    samples: list[LaunchSample] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        if "warm" in names:
            stack.enter_context(launchers.kept_warm(LAUNCHERS["warm"], inherited, folder))
        for number in range(repeat + 1):
            for name in rotated(names, number):
                sample = runner.launch(LaunchCase(name, "exit", ranks), number, inherited, folder)
                runner.report_progress(f"round {number} of {repeat}" if number else "warm-up", sample)
                samples += [sample] if number else []
    return [exit_times(samples, name, ranks) for name in names]


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench exit` and return its exit code."""
    options = _parser().parse_args(argv)
    names = choices("--contenders", options.contenders, LAUNCHERS)
    if options.repeat < 1 or options.ranks < 1:
        raise OptionError("--repeat and --ranks must be at least 1", fix="--ranks 8 --repeat 5")
    for name in names:
        launchers.check_installed(LAUNCHERS[name])
    before = machine_info()
    exits = measure(names, options.ranks, options.repeat, inherited)
    judged = target(exits)
    if options.json:
        document = {"machine": asdict(before), "exits": [asdict(one) for one in exits], "target": asdict(judged)}
        sys.stdout.write(f"{json.dumps(document, indent=2)}\n")
    else:
        load = before.load_before[0]
        sys.stdout.write(f"from the last line to the prompt, {options.ranks} ranks; load average {load:.1f} before\n")
        for one in exits:
            sys.stdout.write(f"  {LAUNCHERS[one.contender].label:<20}{one.text}\n")
        met = {True: "met", False: "missed", None: ""}[judged.met]
        sys.stdout.write(f"target, {judged.what}: {judged.evidence} {met}".rstrip() + "\n")
    return 1 if any(one.failures for one in exits) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench exit",
        description="Time from the last line of a script to the end of the launcher, gloo on the CPU, for phalanx and "
        "other launchers.",
    )
    names = ",".join(_MEASURED)
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="number of ranks (8)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (5)")
    parser.add_argument("--contenders", default=names, metavar="A,B", help=f"launchers to compare ({names})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser
