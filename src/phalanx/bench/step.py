"""What does a training step cost through phalanx, beside the same loop in raw PyTorch DDP and in its peers?

All contenders train the same model in the same processes, some steps each in turn, so that whatever else this machine
does meanwhile hits all alike. A ratio is the median, over the rounds, of a contender's time by raw PyTorch's in that
round. Raw PyTorch is there twice: by how much it differs from itself is how little can be told.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from phalanx.bench import contenders, machine
from phalanx.bench.contenders import CONTENDERS
from phalanx.bench.results import Target
from phalanx.errors import OptionError

LIMIT = 1.01  # of raw PyTorch's time
TIMEOUT = 600.0

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts", "step.py")

# name -> label, package
LOOPS = {
    "raw": ("raw PyTorch DDP", "torch"),
    "again": ("raw PyTorch DDP, again", "torch"),
    "phalanx": ("phalanx", "torch"),
    "accelerate": ("Accelerate", "accelerate"),
    "fabric": ("Lightning Fabric", "lightning"),
}


@dataclass(frozen=True)
class Case:
    name: str
    accumulate: int = 1
    clip: float | None = None
    reads: bool = False  # batches of a data set, each its own; else one batch again and again


CASES = {
    case.name: case
    for case in (
        Case("plain"),
        Case("clipped", clip=1.0),
        Case("accumulated", accumulate=4, clip=1.0),
        Case("data", accumulate=4, clip=1.0, reads=True),
    )
}


@dataclass(frozen=True)
class Times:
    """A contender in one case: seconds a micro-batch, by round. One that failed has a reason, and no times."""

    case: str
    contender: str
    seconds: tuple[float, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class Row:
    case: str
    contender: str
    milliseconds: float | None  # median
    ratio: float | None  # to raw, median of the rounds' own
    low: float | None  # the ratio's quartiles
    high: float | None
    error: float | None = None  # of the ratio: what it may be off by, in 19 of 20 runs


def rows(measured: Sequence[Times]) -> list[Row]:
    raw = {times.case: times.seconds for times in measured if times.contender == "raw"}
    found = []
    for times in measured:
        if not times.seconds:
            found.append(Row(times.case, times.contender, None, None, None, None))
            continue
        pairs = zip(times.seconds, raw.get(times.case, ()), strict=False)
        ratios = sorted(own / other for own, other in pairs)
        middle = round(statistics.median(times.seconds) * 1000, 4)
        if not ratios:
            found.append(Row(times.case, times.contender, middle, None, None, None))
            continue
        low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
        # A median's standard error, twice; the quartiles stand for the spread, for outliers are many.
        error = 2 * 1.2533 * (high - low) / 1.349 / math.sqrt(len(ratios))
        numbers = (statistics.median(ratios), low, high, error)
        found.append(Row(times.case, times.contender, middle, *(round(number, 4) for number in numbers)))
    return found


def targets(found: Sequence[Row]) -> list[Target]:
    judged = []
    for case in dict.fromkeys(row.case for row in found):
        what = f"a step, {case}: at most {LIMIT:.2f} of raw PyTorch DDP"
        row = next((row for row in found if (row.case, row.contender) == (case, "phalanx")), None)
        if row is None or row.ratio is None:
            judged.append(Target(what, "not part of this run" if row is None else "not measured", None))
            continue
        again = next((other.ratio for other in found if (other.case, other.contender) == (case, "again")), None)
        text = f"{row.ratio:.4f} ± {row.error or 0.0:.4f}"
        surely_over = row.ratio - (row.error or 0.0) > LIMIT
        if again is not None and abs(again - 1) > LIMIT - 1:
            text += f", but raw PyTorch is {again:.4f} of itself: this machine is too busy to tell"
            judged.append(Target(what, text, None))
        elif (row.error or 0.0) > LIMIT - 1 and not surely_over:
            judged.append(Target(what, f"{text}: this machine is too busy to tell, or the rounds too few", None))
        else:
            judged.append(Target(what, text, row.ratio <= LIMIT))
    return judged


def measure(case: Case, names: Sequence[str], options: argparse.Namespace, inherited: Mapping[str, str]) -> list[Times]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = os.path.join(folder, "result.json")
        told = {
            "contenders": list(names),
            "case": asdict(case),
            "file": file,
            **{name: getattr(options, name) for name in ("rounds", "steps", "width", "layers", "batch", "device")},
        }
        where = ["--cpu"] if options.device == "cpu" else []
        line = [sys.executable, "-m", "phalanx", "run", "-g", str(options.ranks), *where, _SCRIPT, json.dumps(told)]
        environ = contenders.environment(CONTENDERS["phalanx"], options.ranks, inherited, folder)
        failure = run(line, environ, folder)
        if failure:
            return [Times(case.name, name, failure=failure) for name in names]
        with open(file) as text:
            result = json.load(text)
    return [
        Times(case.name, name, tuple(result["samples"].get(name, ())), result["failures"].get(name, ""))
        for name in names
    ]


def run(line: list[str], environ: Mapping[str, str], folder: str) -> str:
    """Empty when all went well. Output into a file: a pipe that nobody reads would hold the ranks."""
    log = os.path.join(folder, "output")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            line, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"not over after {TIMEOUT:.0f} s"
        finally:
            if process.returncode is None:
                process.terminate()
                process.wait()
    if not code:
        return ""
    with open(log, errors="replace") as text:
        said = [line for line in text.read().splitlines() if line.startswith("phalanx: ")]
    return f"exit code {code}: {said[-1] if said else 'nothing said'}"


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    names, cases = _names(options.contenders), _cases(options.cases)
    for name in ("ranks", "rounds", "steps", "width", "layers", "batch"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name} {getattr(options, name)}: at least one is needed", fix=f"--{name} 2")
    if options.steps % max(case.accumulate for case in cases):
        raise OptionError(f"--steps {options.steps}: a multiple of 4, so that no window is cut", fix="--steps 4")
    before = machine.machine()
    measured: list[Times] = []
    for case in cases:
        measured += measure(case, names, options, inherited)
        sys.stderr.write(f"{case.name}: {options.rounds} rounds of {options.steps} steps\n")
    found = rows(measured)
    judged = targets(found)
    data = {
        "benchmark": "step",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "samples": [asdict(times) for times in measured],
        "rows": [asdict(row) for row in found],
        "targets": [asdict(target) for target in judged],
    }
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    _show(found, judged, measured)
    ours = any(times.failure for times in measured if times.contender in ("raw", "again", "phalanx"))
    return 1 if ours or any(target.met is False for target in judged) else 0


def _show(found: Sequence[Row], judged: Sequence[Target], measured: Sequence[Times]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    title = "A training step beside the same loop in raw PyTorch DDP: medians"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name, justify in (
        ("case", "left"),
        ("loop", "left"),
        ("ms", "right"),
        ("of raw", "right"),
        ("half of rounds", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in found:
        if row.milliseconds is None:
            table.add_row(row.case, LOOPS[row.contender][0], "-", "-", "-")
        else:
            ratio = ("-", "-") if row.ratio is None else (f"{row.ratio:.4f}", f"{row.low:.3f}..{row.high:.3f}")
            table.add_row(row.case, LOOPS[row.contender][0], f"{row.milliseconds:.3f}", *ratio)
    console.print(table)
    for target in judged:
        verdict = {True: "met", False: "missed", None: "not measured"}[target.met]
        console.print(f"{verdict:<14}{target.what}: {target.evidence}", highlight=False, soft_wrap=True)
    for times in measured:
        if times.failure:
            text = f"{LOOPS[times.contender][0]}, {times.case}: {times.failure}"
            console.print(f"{'failed':<14}{text}", markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench step",
        description="A training step through phalanx, beside the same loop in raw PyTorch DDP, Accelerate and "
        "Lightning Fabric: in turns, in the same processes.",
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="medians are of so many rounds (200)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="micro-batches a round, of each loop (4)")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="of a layer (256)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of the model (4)")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="samples of a rank (64)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    parser.add_argument(
        "--contenders",
        default=",".join(name for name, (_, package) in LOOPS.items() if importlib.util.find_spec(package)),
        metavar="A,B",
        help=f"of {', '.join(LOOPS)} (those that are installed)",
    )
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in LOOPS:
            raise OptionError(f'--contenders: "{name}" is not known', fix=f"--contenders {','.join(LOOPS)}")
        if importlib.util.find_spec(LOOPS[name][1]) is None:
            raise OptionError(
                f"--contenders: {LOOPS[name][0]} cannot be measured, {LOOPS[name][1]} is not installed",
                fix=f"pip install {LOOPS[name][1]}, or leave {name} out",
            )
    if "raw" not in names:
        raise OptionError("--contenders: raw is what the others are compared with", fix=f"--contenders raw,{text}")
    return names


def _cases(text: str) -> list[Case]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CASES:
            raise OptionError(f'--cases: "{name}" is not known', fix=f"--cases {','.join(CASES)}")
    return [CASES[name] for name in names]
