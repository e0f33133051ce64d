"""What does a training step cost with phalanx, compared with the same loop in raw PyTorch DDP?

All contenders train the same model in the same processes, a few steps each in turn. A ratio is the median over all
rounds of a contender's time divided by the time of raw PyTorch in the same round. Raw PyTorch takes part twice: the
difference between its two loops is the noise of the measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from benchmarks.common.options import choices
from benchmarks.common.paths import script
from benchmarks.common.processes import run_logged
from benchmarks.common.ratios import median_error, quartiles
from benchmarks.common.targets import Target, any_missed
from phalanx.errors import OptionError

LIMIT = 1.01  # of raw PyTorch's time

# name -> label, package
LOOPS = {
    "raw": ("raw PyTorch DDP", "torch"),
    "again": ("raw PyTorch DDP, again", "torch"),
    "phalanx": ("phalanx", "torch"),
    "accelerate": ("Accelerate", "accelerate"),
    "fabric": ("Lightning Fabric", "lightning"),
}


def baseline(strategy: str = "ddp") -> str:
    """Return the label of the loop that the others are compared with: "raw PyTorch FSDP"."""
    return f"raw PyTorch {strategy.upper()}"


def label(contender: str, strategy: str = "ddp") -> str:
    """Return the label of a loop that trains with this strategy."""
    return LOOPS[contender][0].replace(baseline(), baseline(strategy))


@dataclass(frozen=True)
class StepCase:
    """What a loop does in a step."""

    name: str
    accumulate: int = 1
    clip: float | None = None
    reads: bool = False  # reads a dataset; otherwise the same batch in every step


CASES = {
    case.name: case
    for case in (
        StepCase("plain"),
        StepCase("clipped", clip=1.0),
        StepCase("accumulated", accumulate=4, clip=1.0),
        StepCase("data", accumulate=4, clip=1.0, reads=True),
    )
}


@dataclass(frozen=True)
class StepTimes:
    """The seconds per micro-batch of a contender in one case, by round. A failed one has a reason and no times."""

    case: str
    contender: str
    seconds: tuple[float, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class StepRow:
    """The medians of a contender in one case."""

    case: str
    contender: str
    milliseconds: float | None  # median
    ratio: float | None  # to raw PyTorch: the median over the rounds
    low: float | None  # the ratio's quartiles
    high: float | None
    error: float | None = None  # of the ratio: half of its 95 % confidence interval


def rows(measured: Sequence[StepTimes]) -> list[StepRow]:
    """Return one row per contender and case."""
    raw = {times.case: times.seconds for times in measured if times.contender == "raw"}
    found = []
    for times in measured:
        if not times.seconds:
            found.append(StepRow(times.case, times.contender, None, None, None, None))
            continue
        pairs = zip(times.seconds, raw.get(times.case, ()), strict=False)
        ratios = sorted(own / other for own, other in pairs)
        middle = round(statistics.median(times.seconds) * 1000, 4)
        if not ratios:
            found.append(StepRow(times.case, times.contender, middle, None, None, None))
            continue
        numbers = (statistics.median(ratios), *quartiles(ratios), median_error(ratios))
        found.append(StepRow(times.case, times.contender, middle, *(round(number, 4) for number in numbers)))
    return found


def targets(found: Sequence[StepRow], strategy: str = "ddp") -> list[Target]:
    """Judge the time of phalanx in each case. `strategy`: how the loops wrap the model."""
    judged = []
    for case in dict.fromkeys(row.case for row in found):
        what = f"a step, {case}: at most {LIMIT:.2f} of {baseline(strategy)}"
        row = next((row for row in found if (row.case, row.contender) == (case, "phalanx")), None)
        if row is None or row.ratio is None:
            judged.append(Target(what, "not part of this run" if row is None else "not measured", None))
            continue
        again = next((other.ratio for other in found if (other.case, other.contender) == (case, "again")), None)
        text = f"{row.ratio:.4f} ± {row.error or 0.0:.4f}"
        surely_over = row.ratio - (row.error or 0.0) > LIMIT
        if again is not None and abs(again - 1) > LIMIT - 1:
            text += f", but the second loop of raw PyTorch takes {again:.4f} of the first: too much noise to tell"
            judged.append(Target(what, text, None))
        elif (row.error or 0.0) > LIMIT - 1 and not surely_over:
            judged.append(
                Target(what, f"{text}: too much noise to tell: the machine is busy, or there are too few rounds", None)
            )
        else:
            judged.append(Target(what, text, row.ratio <= LIMIT))
    return judged


def measure(
    case: StepCase, names: Sequence[str], options: argparse.Namespace, inherited: Mapping[str, str]
) -> list[StepTimes]:
    """Run all rounds of a case in one `phalanx run`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = os.path.join(folder, "result.json")
        config = {
            "contenders": list(names),
            "case": asdict(case),
            "file": file,
            **{name: getattr(options, name) for name in ("rounds", "steps", "width", "layers", "batch", "device")},
        }
        where = ["--cpu"] if options.device == "cpu" else []
        command = [sys.executable, "-P", "-m", "phalanx", "run", "-g", str(options.ranks), *where, script("step.py")]
        environ = launchers.environment(LAUNCHERS["phalanx"], options.ranks, inherited, folder)
        failure = run_logged([*command, json.dumps(config)], environ, folder)
        if failure:
            return [StepTimes(case.name, name, failure=failure) for name in names]
        with open(file) as text:
            result = json.load(text)
    return [
        StepTimes(case.name, name, tuple(result["samples"].get(name, ())), result["failures"].get(name, ""))
        for name in names
    ]


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench step` and return its exit code."""
    options = _parser().parse_args(argv)
    names = _names(options.contenders)
    cases = [CASES[name] for name in choices("--cases", options.cases, CASES)]
    for name in ("ranks", "rounds", "steps", "width", "layers", "batch"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name} {getattr(options, name)}: at least 1 is needed", fix=f"--{name} 2")
    if options.steps % max(case.accumulate for case in cases):
        raise OptionError(
            f"--steps {options.steps}: must be a multiple of 4, so that every accumulation is complete", fix="--steps 4"
        )
    before = machine_info()
    measured: list[StepTimes] = []
    for case in cases:
        measured += measure(case, names, options, inherited)
        sys.stderr.write(f"{case.name}: {options.rounds} rounds of {options.steps} steps\n")
    found = rows(measured)
    judged = targets(found)
    results = {
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "samples": [asdict(times) for times in measured],
        "rows": [asdict(row) for row in found],
        "targets": [asdict(target) for target in judged],
    }
    output.write_json(options.json, "step", before, results)
    _show(found, judged, measured)
    ours = any(times.failure for times in measured if times.contender in ("raw", "again", "phalanx"))
    return 1 if ours or any_missed(judged) else 0


def _show(found: Sequence[StepRow], judged: Sequence[Target], measured: Sequence[StepTimes]) -> None:
    console = output.make_console()
    title = "A training step, compared with the same loop in raw PyTorch DDP: medians"
    table = output.make_table(title, ("case", "loop"), ("ms", "of raw", "half of rounds"))
    for row in found:
        if row.milliseconds is None:
            table.add_row(row.case, LOOPS[row.contender][0], "-", "-", "-")
        else:
            ratio = ("-", "-") if row.ratio is None else (f"{row.ratio:.4f}", f"{row.low:.3f}..{row.high:.3f}")
            table.add_row(row.case, LOOPS[row.contender][0], f"{row.milliseconds:.3f}", *ratio)
    console.print(table)
    output.print_targets(console, judged)
    for times in measured:
        if times.failure:
            output.print_line(console, "failed", f"{LOOPS[times.contender][0]}, {times.case}: {times.failure}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench step",
        description="A training step with phalanx, raw PyTorch DDP, Accelerate and Lightning Fabric, in turn in the "
        "same processes.",
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="rounds (200)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="micro-batches per round and loop (4)")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="width of a layer (256)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers of the model (4)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="samples per rank (64)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the ranks (cpu)")
    parser.add_argument(
        "--contenders",
        default=",".join(name for name, (_, package) in LOOPS.items() if importlib.util.find_spec(package)),
        metavar="A,B",
        help=f"loops to compare: {', '.join(LOOPS)} (those that are installed)",
    )
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help=f"cases: {', '.join(CASES)} (all)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = choices("--contenders", text, LOOPS)
    for name in names:
        if importlib.util.find_spec(LOOPS[name][1]) is None:
            raise OptionError(
                f"--contenders: {LOOPS[name][0]} cannot be measured, {LOOPS[name][1]} is not installed",
                fix=f"pip install {LOOPS[name][1]}, or leave {name} out",
            )
    if "raw" not in names:
        raise OptionError(
            "--contenders: raw is missing, with which the others are compared", fix=f"--contenders raw,{text}"
        )
    return names
