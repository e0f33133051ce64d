"""What does the probe cost, and how fast is a stalled rank diagnosed?

cost: a training step of about a millisecond with and without the probe, in turn in the same processes, and the CPU time
of the probe itself.
stall: see stall.py.
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

from benchmarks.common import launchers, output
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.machine import machine_info
from benchmarks.common.paths import script
from benchmarks.common.processes import run_logged
from benchmarks.common.ratios import Pairs, relative_difference
from benchmarks.common.targets import Target, any_missed
from benchmarks.explain import stall
from phalanx.errors import OptionError

LIMIT = 0.005  # of a step

ONLY = ("cost", "stall")


@dataclass(frozen=True)
class ProbeCost:
    """What the probe costs a training step."""

    ranks: int
    milliseconds: float = 0.0  # a step without the probe
    cost: float = 0.0  # more time per step: 0.001 is a thousandth
    error: float = 0.0  # half of its 95 % confidence interval
    computing: float = 0.0  # more CPU time per step, which depends less on other load
    computing_error: float = 0.0
    used: float = 0.0  # CPU time of the probe per second
    failure: str = ""


def cost(ranks: int, pairs: Pairs, computing: Pairs, used: Sequence[float]) -> ProbeCost:
    """Return the cost from rounds with and without the probe. Each pair is (with, without)."""
    alone = statistics.median(alone for _, alone in pairs) * 1000
    numbers = (*relative_difference(pairs), *relative_difference(computing), round(statistics.median(used), 5))
    return ProbeCost(ranks, round(alone, 4), *numbers)


def target(found: ProbeCost) -> Target:
    """Judge the cost of the probe."""
    what = f"a step of {found.milliseconds:.2f} ms, {_ranks(found.ranks)}: the probe costs at most {LIMIT:.1%}"
    if found.failure:
        return Target(what, found.failure, None)
    text = f"{found.cost:+.2%} ± {found.error:.2%}, CPU time {found.computing:+.2%} ± {found.computing_error:.2%}"
    text += f"; the probe uses {found.used:.2%} of a core"
    if found.error > LIMIT and found.cost - found.error <= LIMIT:
        return Target(what, f"{text}. Too much noise to tell: the machine is busy, or there are too few rounds", None)
    return Target(what, text, found.cost <= LIMIT)


def measure(ranks: int, options: argparse.Namespace, inherited: Mapping[str, str]) -> ProbeCost:
    """Measure the probe in a run of `ranks` ranks."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = os.path.join(folder, "result.json")
        config = {"file": file, **{name: getattr(options, name) for name in ("rounds", "seconds", "width")}}
        command = [sys.executable, "-P", "-m", "phalanx", "run", "-g", str(ranks), "--cpu", script("probe.py")]
        environ = launchers.environment(LAUNCHERS["phalanx"], ranks, inherited, folder)
        failure = run_logged([*command, json.dumps(config)], environ, folder)
        if failure:
            return ProbeCost(ranks, failure=failure)
        with open(file) as text:
            result = json.load(text)
    return cost(ranks, result["pairs"], result["computing"], result["used"])


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench explain` and return its exit code."""
    options = _parser().parse_args(argv)
    if options.rounds < 4 or options.seconds <= 0:
        raise OptionError("at least 4 rounds of more than 0 seconds are needed", fix="--rounds 40 --seconds 0.5")
    before = machine_info()
    found: list[ProbeCost] = []
    stalls: list[stall.StallSample] = []
    for ranks in (1, 2) if options.only != "stall" else ():
        found.append(measure(ranks, options, inherited))
        sys.stderr.write(f"{_ranks(ranks)}: {options.rounds} rounds of {options.seconds} s with and without\n")
    judged = [target(one) for one in found]
    if options.only != "cost":
        stalls = stall.measure_all(options, inherited)
        judged.append(stall.target(stalls))
    results = {
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "cost": [asdict(one) for one in found],
        "stalls": [asdict(one) for one in stalls],
        "targets": [asdict(one) for one in judged],
    }
    output.write_json(options.json, "explain", before, results)
    output.print_targets(output.make_console(), judged)
    failed = any(one.failure for one in found) or any(one.failure for one in stalls)
    return 1 if failed or any_missed(judged) else 0


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench explain",
        description="The overhead of the probe, and the time to diagnose a stalled rank.",
    )
    parser.add_argument("--only", choices=ONLY, default=None, help="measure only this part (all)")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="rounds with and without the probe (60)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="S", help="seconds of steps per round, for each (0.5)"
    )
    parser.add_argument("--width", type=int, default=192, metavar="N", help="width of a layer (192)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of the run that stalls (8)")
    parser.add_argument("--stalls", type=int, default=5, metavar="N", help="runs that stall (5)")
    parser.add_argument(
        "--stall-timeout", type=float, default=3.0, metavar="S", help="--stall-timeout of these runs, in seconds (3)"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser
