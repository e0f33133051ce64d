"""What does a dead rank cost? From the kill to the next committed step, in goodput, and while nobody dies.

Ranks are killed from outside, with SIGKILL, at a random moment of a step; each tells a pipe of every step that it has
committed, with the time by a clock that all processes share. Contenders run in turn, the same model in each:

phalanx    a script with phalanx.main: the ranks that are left regroup, and a fork takes the place of the dead
spare      the same, with a spare that waits (only where it is named)
restart    a plain DDP script with a checkpoint every step: phalanx starts all ranks again
torchrun   the same script; with the variable without which its restarts fail more often than not
torchft    its example of DDP, a process a replica group; each is started again as soon as it has ended
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from phalanx.bench import contenders, machine, step
from phalanx.bench.launch import chosen, rotated
from phalanx.bench.marks import median, newest
from phalanx.bench.report import verdict
from phalanx.bench.results import Target
from phalanx.bench.survivors import SURVIVORS
from phalanx.bench.training import LostError, Training
from phalanx.cluster import nvidia
from phalanx.errors import OptionError

RECOVERY, COLLECTIVE, GOODPUT = 0.3, 1.5, 0.9  # seconds, seconds, share of undisturbed steps
ON_GPU, WITH_SPARE = 1.0, 0.5  # seconds: the first of these between NCCL ranks
PARTS = {
    "kill": "from the kill of a rank to the next committed step",
    "goodput": "steps with a kill now and then, beside undisturbed ones",
    "ready": "a step while nobody dies, beside raw DDP",
    "faults": "so many kills in a row",
}
_SETTLED = 6  # steps between two kills
# By the clock, and by the CPU time of all ranks: that is the same on a machine that has other things to do.
_READY = ("ready for faults", "ready for faults, in CPU time")
_SMALL = 10_000  # parameters, where faults are counted and not timed


@dataclass(frozen=True)
class Sample:
    """One kill; seconds from it. One that was not recovered from has a reason, and no times."""

    contender: str
    round: int
    rank: int = -1
    first: float | None = None
    whole: float | None = None
    met: float | None = None
    ready: float | None = None
    step: float | None = None  # an undisturbed one, before it
    lost: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Pair:
    """Steps in a time that nothing disturbed, and in one as long that began with a kill."""

    round: int
    undisturbed: int
    killed: int


@dataclass(frozen=True)
class Row:
    """All kills of a contender; medians, and the shortest and the longest."""

    contender: str
    kills: int
    recovered: int
    first: tuple[float, ...]
    whole: tuple[float, ...]
    met: tuple[float, ...]
    ready: tuple[float, ...]
    step: float | None
    steps: float | None  # undisturbed ones that would have been done in the time
    lost: int


def rows(samples: Sequence[Sample]) -> list[Row]:
    found = []
    for name in SURVIVORS:
        mine = [sample for sample in samples if sample.contender == name]
        fine = [sample for sample in mine if not sample.failure]
        if mine:
            found.append(
                Row(
                    contender=name,
                    kills=len(mine),
                    recovered=len(fine),
                    first=_sorted(one.first for one in fine),
                    whole=_sorted(one.whole for one in fine),
                    met=_sorted(one.met for one in fine),
                    ready=_sorted(one.ready for one in fine),
                    step=median(_sorted(one.step for one in fine)),
                    steps=median(_sorted(one.whole / one.step for one in fine if one.whole and one.step)),
                    lost=sum(one.lost for one in fine),
                )
            )
    return found


def _sorted(times: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(sorted(time for time in times if time is not None))


class Bench:
    """The parts of this benchmark, each with what it found."""

    def __init__(self, options: argparse.Namespace, inherited: Mapping[str, str], folder: str) -> None:
        self._options = options
        self._inherited = inherited
        self._folder = folder
        self._chance = random.Random(options.seed)
        self._trainings = 0
        self.samples: list[Sample] = []
        self.pairs: list[Pair] = []
        self.ready: list[step.Times] = []
        self.faults: list[Sample] = []
        self.failures: list[str] = []

    def measure(self, part: str, names: Sequence[str]) -> None:
        try:
            match part:
                case "kill":
                    self._measure_kills(names)
                case "goodput":
                    self._measure_goodput()
                case "ready":
                    self._measure_ready()
                case "faults":
                    self._measure_faults()
        except LostError as lost:
            self.failures.append(f"{part}: {lost}")

    def _training(self, name: str, params: int, *, ranks: int = 0, keeps: bool = True, turns: bool = False) -> Training:
        """Each in a folder of its own, but phalanx with the state of its runs before: it learns what a script needs."""
        survivor, ranks = SURVIVORS[name], ranks or self._options.ranks
        self._trainings += 1
        folder = os.path.join(self._folder, f"{self._trainings}")
        told = {
            "loop": survivor.loop,
            "params": params,
            "turns": os.path.join(folder, "turns") if turns else None,
            "kept": os.path.join(folder, "kept.pt") if keeps else None,
            "gpus": self._options.gpus,
        }
        environ = contenders.environment(survivor.contender, ranks, self._inherited, self._folder)
        line = survivor.line(ranks, gpu=self._options.gpu)
        return Training(line, told, ranks, {**environ, **survivor.variables}, folder)

    # -- from the kill to the next step

    def _measure_kills(self, names: Sequence[str]) -> None:
        for name in names:
            if SURVIVORS[name].learns and not self._options.quick:
                self._rehearse(name)
        for number in range(1, self._options.rounds + 1):
            for name in rotated(names, number):
                self._round(name, number)

    def _rehearse(self, name: str) -> None:
        """Lets a phalanx fork server learn what the script imports."""
        with contextlib.suppress(LostError), self._training(name, _SMALL) as training:
            training.settle(1)

    def _round(self, name: str, number: int) -> None:
        left = self._options.kills
        while left:
            begun = left
            with self._training(name, self._options.params) as training:
                while left:
                    left -= 1
                    sample = self._killed(training, name, number)
                    self.samples.append(sample)
                    self._tell(f"round {number} of {self._options.rounds}", sample)
                    if sample.failure:
                        break
            if sample.failure and left == begun - 1 and sample.rank < 0:  # it cannot even start
                return

    def _killed(self, training: Training, name: str, number: int, settled: int = _SETTLED) -> Sample:
        rank = -1
        try:
            group = training.settle(settled)
            alone = median(training.step_times())
            kill = training.kill(group, self._chance, alone or 0.0)
            rank = kill.rank
            found = training.recovered(kill)
        except LostError as lost:
            return Sample(name, number, rank, failure=str(lost))
        return Sample(name, number, rank, **asdict(found), step=alone)

    # -- goodput

    def _measure_goodput(self) -> None:
        """Undisturbed and disturbed in turn, in one run: whatever else this machine does hits both alike."""
        with self._training("phalanx", self._options.params) as training:
            for number in range(1, self._options.rounds + 1):
                group = training.settle(_SETTLED)
                undisturbed = self._steps(training)
                training.kill(group, self._chance)
                killed = self._steps(training)
                self.pairs.append(Pair(number, undisturbed, killed))
                share = killed / undisturbed if undisturbed else 0.0
                _say(f"goodput {number}", f"{undisturbed} steps undisturbed, {killed} with a kill: {share:.1%}")

    def _steps(self, training: Training) -> int:
        begin = time.monotonic()
        training.watch(self._options.every)
        end = begin + self._options.every
        return newest(training.marks, end) - newest(training.marks, begin)

    # -- the cost of being ready

    def _measure_ready(self) -> None:
        """Runs of their own, side by side: while one does some steps, the others wait for their turn."""
        ranks = min(self._options.ranks, len(os.sched_getaffinity(0)))
        names = {"raw": "restart", "again": "restart", "phalanx": "phalanx"}
        with contextlib.ExitStack() as stack:
            trainings = {}
            for name, way in names.items():
                training = self._training(way, self._options.params, ranks=ranks, keeps=False, turns=True)
                trainings[name] = stack.enter_context(training)
            for training in trainings.values():
                training.gather()
                training.turn(3)
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for number in range(self._options.turns):
                for name in rotated(tuple(names), number):
                    taken[name].append(trainings[name].turn(self._options.steps))
        for place, case in enumerate(_READY):
            for name, times in taken.items():
                seconds = tuple(time[place] / self._options.steps for time in times)
                self.ready.append(step.Times(case, name, seconds))
        _say("ready", f"{self._options.turns} turns of {self._options.steps} steps on {ranks} ranks")

    # -- faults in a row

    def _measure_faults(self) -> None:
        """In one run: the first that it does not get over is the last."""
        with self._training("phalanx", _SMALL) as training:
            for number in range(1, self._options.faults + 1):
                sample = self._killed(training, "phalanx", number, settled=3)
                self.faults.append(sample)
                if sample.failure or number % 50 == 0 or number == self._options.faults:
                    self._tell(f"fault {number}", sample)
                if sample.failure:
                    return

    def _tell(self, title: str, sample: Sample) -> None:
        took = f"failed: {sample.failure}" if sample.failure else f"{sample.whole:6.3f} s, {sample.lost} steps lost"
        _say(title, f"{sample.contender:<12}rank {sample.rank:<4}{took}")


def _say(title: str, text: str) -> None:
    sys.stderr.write(f"{title:<16}{text}\n")


# -- what was promised


def targets(bench: Bench, options: argparse.Namespace) -> list[Target]:
    found = {row.contender: row for row in rows(bench.samples)}
    size = f"{options.ranks} ranks, {options.params:,} parameters with AdamW"
    ours = found.get("phalanx")
    limit = ON_GPU if options.gpu else RECOVERY
    judged = [
        _below(f"kill to the next committed step, {size}: below {limit} s", ours, "whole", limit),
        _none_lost(ours),
        _below(
            f"plain script, started again: below {COLLECTIVE} s to its first collective",
            found.get("restart"),
            "met",
            COLLECTIVE,
        ),
        _goodput(bench.pairs, options.every),
    ]
    if "spare" in found:
        judged.insert(1, _below(f"the same with a spare: below {WITH_SPARE} s", found["spare"], "whole", WITH_SPARE))
    ready = step.targets(step.rows(bench.ready))
    if not ready:
        what = f"a step, {_READY[0]}: at most {step.LIMIT} of raw PyTorch DDP"
        ready = [Target(what, "not part of this run", None)]
    judged += ready
    over = sum(not sample.failure for sample in bench.faults)
    what = f"{options.faults} faults in a row: all recovered"
    evidence = f"{over} of {options.faults}" if bench.faults else "not part of this run"
    return [*judged, Target(what, evidence, over == options.faults if bench.faults else None)]


def _none_lost(row: Row | None) -> Target:
    what = "no committed step is lost"
    if row is None or not row.recovered:
        return Target(what, "not part of this run" if row is None else "nothing was recovered", None)
    return Target(what, f"{row.lost} in {row.recovered} recoveries", row.lost == 0)


def _below(what: str, row: Row | None, field: str, limit: float) -> Target:
    if row is None:
        return Target(what, "not part of this run", None)
    times = getattr(row, field)
    middle = median(times)
    if middle is None or row.recovered < row.kills:
        return Target(what, f"{row.recovered} of {row.kills} recovered", False)
    return Target(what, f"{middle:.3f} s ({times[0]:.3f}..{times[-1]:.3f})", middle < limit)


def _goodput(pairs: Sequence[Pair], every: float) -> Target:
    what = f"steps with a kill every {every:g} s: at least {GOODPUT:.0%} of undisturbed ones"
    shares = sorted(pair.killed / pair.undisturbed for pair in pairs if pair.undisturbed)
    middle = median(shares)
    if middle is None:
        return Target(what, "not part of this run", None)
    return Target(what, f"{middle:.1%} ({shares[0]:.1%}..{shares[-1]:.1%})", middle >= GOODPUT)


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    if options.quick:
        options.rounds, options.kills, options.params, options.every = 1, 1, _SMALL, 1.0
        options.turns, options.faults = 3, 2
    for name in ("ranks", "params", "rounds", "kills", "turns", "steps", "faults", "every"):
        if getattr(options, name) <= 0:
            raise OptionError(f"--{name} {getattr(options, name)}: at least one is needed", fix=f"--{name} 2")
    parts = chosen("--only", options.only, PARTS)
    names = _names(options.contenders)
    options.gpus = _gpus(options.ranks, inherited) if options.gpu else []
    before = machine.machine()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        if options.quick:  # nothing can be told from its times, so torch is imported once for all runs
            for name in ("phalanx", "restart"):
                stack.enter_context(contenders.kept_warm(SURVIVORS[name].contender, inherited, folder))
        bench = Bench(options, inherited, folder)
        for part in parts:
            bench.measure(part, names)
    judged = targets(bench, options)
    if options.json:
        data = {
            "benchmark": "recover",
            "machine": {**asdict(before), "load_after": os.getloadavg(), "torchft": _torchft()},
            "settings": {name: value for name, value in vars(options).items() if name != "json"},
            "samples": [asdict(sample) for sample in bench.samples],
            "rows": [asdict(row) for row in rows(bench.samples)],
            "goodput": [asdict(pair) for pair in bench.pairs],
            "ready": [asdict(row) for row in step.rows(bench.ready)],
            "faults": [asdict(sample) for sample in bench.faults],
            "failures": bench.failures,
            "targets": [asdict(target) for target in judged],
        }
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    _show(bench, judged)
    return 1 if bench.failures or any(target.met is False for target in judged) else 0


def _show(bench: Bench, judged: Sequence[Target]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    if bench.samples:
        title = "A rank is killed: seconds from then until the last rank is there, median and min..max"
        table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
        table.add_column("")
        names = ("recovered", "first\ncollective", "state\nthere", "next step,\nanybody's", "next step,\neverybody's")
        for name in (*names, "a step\nundisturbed", "so many\nsteps", "steps\ndone again"):
            table.add_column(name, justify="right")
        for row in rows(bench.samples):
            times = (_spread(times) for times in (row.met, row.ready, row.first, row.whole))
            alone = "-" if row.step is None else f"{row.step:.3f}"
            share = "-" if row.steps is None else f"{row.steps:.1f}"
            label = SURVIVORS[row.contender].contender.label
            table.add_row(label, f"{row.recovered} of {row.kills}", *times, alone, share, str(row.lost))
        console.print(table)
    for loop in step.rows(bench.ready):
        if loop.ratio is not None:
            text = f"{step.LOOPS[loop.contender][0]}: {loop.milliseconds:.2f} ms a step, {loop.ratio:.4f} of raw"
            console.print(f"{'no faults':<14}{loop.case}, {text}", highlight=False, soft_wrap=True)
    for target in judged:
        console.print(f"{verdict(target):<14}{target.what}: {target.evidence}", highlight=False, soft_wrap=True)
    for sample in (*bench.samples, *bench.faults):
        if sample.failure:
            text = f"{SURVIVORS[sample.contender].contender.label}, round {sample.round}: {sample.failure}"
            console.print(f"{'failed':<14}{text}", markup=False, highlight=False, soft_wrap=True)
    for failure in bench.failures:
        console.print(f"{'failed':<14}{failure}", markup=False, highlight=False, soft_wrap=True)


def _torchft() -> str:
    """Its version; there are two packages of the name."""
    names = importlib.metadata.packages_distributions().get("torchft", [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else "not installed"


def _spread(times: Sequence[float]) -> str:
    middle = median(times)
    return "-" if middle is None else f"{middle:.2f}\n{times[0]:.2f}..{times[-1]:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench recover",
        description="What a dead rank costs: from its SIGKILL to the next committed step beside torchrun and torchft, "
        "goodput, the cost of being ready while nobody dies, and many faults in a row.",
    )

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")

    number("ranks", 4, "processes")
    number("params", 10_000_000, "parameters of the model")
    number("rounds", 2, "each contender is started so often, and goodput measured")
    number("kills", 3, "in a round")
    number("turns", 40, "of the runs whose steps are compared while nobody dies")
    number("steps", 2, "in a turn")
    number("faults", 20, "in a row")
    number("seed", 1, "of which rank is killed, and when")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between kills for goodput (10)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--contenders", default="", metavar="A,B", help=f"of {', '.join(SURVIVORS)} (the installed)")
    parser.add_argument(
        "--gpu", action="store_true", help="NCCL ranks, a GPU or a MIG slice each, instead of CPU ranks"
    )
    parser.add_argument("--quick", action="store_true", help="one kill of everything, with a tiny model: does it run?")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    return parser


def _gpus(ranks: int, environ: Mapping[str, str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES holds for each rank."""
    found = [device.handle for device in nvidia.survey(environ).visible]
    if len(found) < ranks:
        raise OptionError(
            f"--gpu with {ranks} ranks: {len(found)} GPUs or MIG slices can be used here",
            fix=f"--gpu --ranks {len(found)}" if found else "leave --gpu out",
        )
    return found[:ranks]


def _names(text: str) -> tuple[str, ...]:
    if text:
        names = chosen("--contenders", text, SURVIVORS)
        for name in names:
            contenders.check_installed(SURVIVORS[name].contender)
        return names
    invited = [name for name, one in SURVIVORS.items() if not one.asked]
    here = tuple(name for name in invited if importlib.util.find_spec(SURVIVORS[name].contender.package))
    for name in invited:
        if name not in here:
            _say("left out", f"{name}: it is not installed (pip install {SURVIVORS[name].contender.package})")
    return here
