"""How long from the last line of a script to the prompt, on N ranks?

From the moment at which the last rank has run its last line to the end of the launcher's process. Every contender runs
once per round, in an order that turns, so that whatever else this machine does meanwhile hits all alike.
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

from phalanx.bench import contenders, launch
from phalanx.bench.contenders import CONTENDERS
from phalanx.bench.results import Case, Sample, Target
from phalanx.errors import OptionError

LIMIT = 0.4  # seconds, with 8 ranks
_MEASURED = ("phalanx", "warm", "torchrun")


@dataclass(frozen=True)
class Exit:
    """All rounds of one contender. Times are seconds."""

    contender: str
    ranks: int
    times: tuple[float, ...]
    failures: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        if not self.times:
            return f"failed: {self.failures[0]}"
        spread = f"{min(self.times):.2f}..{max(self.times):.2f}"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"{statistics.median(self.times):.2f} s ({spread}){failed}"


def summed(samples: list[Sample], contender: str, ranks: int) -> Exit:
    own = [sample for sample in samples if sample.case.contender == contender]
    times = [sample.total - sample.seconds for sample in own if sample.total is not None and sample.seconds is not None]
    failures = tuple(sample.failure for sample in own if sample.failure)
    return Exit(contender, ranks, tuple(round(time, 4) for time in times), failures)


def target(exits: list[Exit]) -> Target:
    what = f"8 ranks: below {LIMIT:g} s"
    cold = next((found for found in exits if found.contender == "phalanx" and found.ranks == 8 and found.times), None)
    if cold is None or cold.failures:
        return Target(what, "not measured", None)
    median = statistics.median(cold.times)
    return Target(what, f"{median:.3f} s", median < LIMIT)


def measure(names: tuple[str, ...], ranks: int, repeat: int, inherited: Mapping[str, str]) -> list[Exit]:
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        if "warm" in names:
            stack.enter_context(contenders.kept_warm(CONTENDERS["warm"], inherited, folder))
        for number in range(repeat + 1):  # the first fills caches, and does not count
            for name in launch.rotated(names, number):
                sample = launch.launched(Case(name, "exit", ranks), number, inherited, folder)
                launch.tell(f"round {number} of {repeat}" if number else "rehearsal", sample)
                samples += [sample] if number else []
    return [summed(samples, name, ranks) for name in names]


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    names = launch.chosen("--contenders", options.contenders, CONTENDERS)
    if options.repeat < 1 or options.ranks < 1:
        raise OptionError("--repeat and --ranks are 1 or more", fix="--ranks 8 --repeat 5")
    for name in names:
        contenders.check_installed(CONTENDERS[name])
    from phalanx.bench import machine

    before = machine.machine()
    exits = measure(names, options.ranks, options.repeat, inherited)
    judged = target(exits)
    if options.json:
        document = {"machine": asdict(before), "exits": [asdict(one) for one in exits], "target": asdict(judged)}
        sys.stdout.write(f"{json.dumps(document, indent=2)}\n")
    else:
        load = before.load_before[0]
        sys.stdout.write(f"from the last line to the prompt, {options.ranks} ranks; load average {load:.1f} before\n")
        for one in exits:
            sys.stdout.write(f"  {CONTENDERS[one.contender].label:<20}{one.text}\n")
        met = {True: "met", False: "missed", None: ""}[judged.met]
        sys.stdout.write(f"target, {judged.what}: {judged.evidence} {met}".rstrip() + "\n")
    return 1 if any(one.failures for one in exits) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench exit",
        description="Time from the last line of a script to the end of the launcher, gloo on the CPU, for phalanx and "
        "its peers side by side.",
    )
    names = ",".join(_MEASURED)
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="number of ranks (8)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (5)")
    parser.add_argument("--contenders", default=names, metavar="A,B", help=f"who is measured ({names})")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser
