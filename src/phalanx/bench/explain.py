"""What does it cost to be watched, and how soon is it said who is wrong?

cost: a training step of about a millisecond with the probe of its worker and without, in the same processes, in
turns, so that whatever else this machine does meanwhile hits both alike. Beside it, what the probe itself computes.
stall: stall.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from phalanx.bench import contenders, machine, stall, step
from phalanx.bench.contenders import CONTENDERS
from phalanx.bench.pairs import Pairs, more
from phalanx.bench.results import Target
from phalanx.errors import OptionError

LIMIT = 0.005  # of a step

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts", "probe.py")

ONLY = ("cost", "stall")


@dataclass(frozen=True)
class Cost:
    ranks: int
    milliseconds: float = 0.0  # a step without
    cost: float = 0.0  # of a step: 0.001 is a thousandth
    error: float = 0.0  # what that may be off by, in 19 of 20 runs
    computing: float = 0.0  # the same of the seconds that cores compute, which others on the machine hardly change
    computing_error: float = 0.0
    used: float = 0.0  # cores that the probe keeps busy: a second of computing in a second is 1
    failure: str = ""


def cost(ranks: int, pairs: Pairs, computing: Pairs, used: Sequence[float]) -> Cost:
    """Pairs: with the probe, without."""
    alone = statistics.median(alone for _, alone in pairs) * 1000
    numbers = (*more(pairs), *more(computing), round(statistics.median(used), 5))
    return Cost(ranks, round(alone, 4), *numbers)


def target(found: Cost) -> Target:
    what = f"a step of {found.milliseconds:.2f} ms, {_ranks(found.ranks)}: the probe costs at most {LIMIT:.1%}"
    if found.failure:
        return Target(what, found.failure, None)
    text = (
        f"{found.cost:+.2%} ± {found.error:.2%}, of the CPU's time {found.computing:+.2%} ± {found.computing_error:.2%}"
    )
    text += f"; it computes for {found.used:.2%} of the time"
    if found.error > LIMIT and found.cost - found.error <= LIMIT:
        return Target(what, f"{text}. This machine is too busy to tell, or the rounds too few", None)
    return Target(what, text, found.cost <= LIMIT)


def measure(ranks: int, options: argparse.Namespace, inherited: Mapping[str, str]) -> Cost:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = os.path.join(folder, "result.json")
        told = {"file": file, **{name: getattr(options, name) for name in ("rounds", "seconds", "width")}}
        line = [sys.executable, "-m", "phalanx", "run", "-g", str(ranks), "--cpu", _SCRIPT, json.dumps(told)]
        failure = step.run(line, contenders.environment(CONTENDERS["phalanx"], ranks, inherited, folder), folder)
        if failure:
            return Cost(ranks, failure=failure)
        with open(file) as text:
            result = json.load(text)
    return cost(ranks, result["pairs"], result["computing"], result["used"])


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    if options.rounds < 4 or options.seconds <= 0:
        raise OptionError("too few rounds to tell anything", fix="--rounds 40 --seconds 0.5")
    before = machine.machine()
    found: list[Cost] = []
    stalls: list[stall.Stall] = []
    for ranks in (1, 2) if options.only != "stall" else ():
        found.append(measure(ranks, options, inherited))
        sys.stderr.write(f"{_ranks(ranks)}: {options.rounds} rounds of {options.seconds} s with and without\n")
    judged = [target(one) for one in found]
    if options.only != "cost":
        stalls = stall.measured(options, inherited)
        judged.append(stall.target(stalls))
    data = {
        "benchmark": "explain",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "cost": [asdict(one) for one in found],
        "stalls": [asdict(one) for one in stalls],
        "targets": [asdict(one) for one in judged],
    }
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    for one in judged:
        verdict = {True: "met", False: "missed", None: "not measured"}[one.met]
        sys.stdout.write(f"{verdict:<14}{one.what}: {one.evidence}\n")
    failed = any(one.failure for one in found) or any(one.failure for one in stalls)
    return 1 if failed or any(one.met is False for one in judged) else 0


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench explain", description="What it costs to be watched, and how soon who is wrong is named."
    )
    parser.add_argument("--only", choices=ONLY, default=None, help="one of the questions (all)")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="medians are of so many pairs (60)")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of steps a round, of each (0.5)")
    parser.add_argument("--width", type=int, default=192, metavar="N", help="of a layer (192)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="of which one stops (8)")
    parser.add_argument("--stalls", type=int, default=5, metavar="N", help="runs that stop (5)")
    parser.add_argument("--stall-timeout", type=float, default=3.0, metavar="S", help="the threshold (3)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    return parser
