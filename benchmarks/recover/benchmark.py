"""What does the death of a rank cost: time to the next committed step, goodput, and overhead without faults?

Ranks are killed with SIGKILL at a random moment of a step. Each rank reports every committed step through a pipe, with
the time of a clock that all processes share. Contenders run in turn, with the same model:

phalanx    a script with phalanx.main: the surviving ranks regroup with a forked replacement
spare      the same, with a waiting spare (only where --contenders names it)
restart    a plain DDP script with a checkpoint every step: phalanx restarts all ranks
torchrun   the same script; with the variable without which most of its restarts fail
torchft    its DDP example, one process per replica group, each restarted when it ends
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.common import launchers, output
from benchmarks.common.machine import machine_info
from benchmarks.common.options import choices
from benchmarks.common.processes import ProcessLostError
from benchmarks.common.ratios import median, rotated
from benchmarks.common.targets import Target, any_missed
from benchmarks.recover.launchers import RECOVERY_LAUNCHERS
from benchmarks.recover.progress import newest_step
from benchmarks.recover.results import READY, GoodputSample, KillSample, RecoverResults, rows, targets
from benchmarks.recover.training_run import TrainingRun
from benchmarks.training import step
from phalanx.cluster import nvidia
from phalanx.errors import OptionError

PARTS = {
    "kill": "time from the kill of a rank to the next committed step",
    "goodput": "steps with periodic kills, compared with undisturbed ones",
    "ready": "time of a step without faults, compared with raw PyTorch",
    "faults": "many kills in a row",
}
_SETTLED = 6  # steps between two kills
_SMALL = 10_000  # parameters, where times do not matter


class RecoverBenchmark:
    """Runs the parts of this benchmark and holds their results."""

    def __init__(self, options: argparse.Namespace, inherited: Mapping[str, str], folder: str) -> None:
        self._options = options
        self._inherited = inherited
        self._folder = folder
        self._rng = random.Random(options.seed)  # noqa: S311
        self._trainings = 0
        self.results = RecoverResults()

    def measure(self, part: str, names: Sequence[str]) -> None:
        """Measure one of PARTS for the contenders `names`."""
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
        except ProcessLostError as lost:
            self.results.failures.append(f"{part}: {lost}")

    def _training(
        self, name: str, params: int, *, ranks: int = 0, keeps: bool = True, turns: bool = False
    ) -> TrainingRun:
        """Start a training in a new folder. PHALANX_HOME is kept, because phalanx learns the imports of a script."""
        launcher, ranks = RECOVERY_LAUNCHERS[name], ranks or self._options.ranks
        self._trainings += 1
        folder = os.path.join(self._folder, f"{self._trainings}")
        config = {
            "loop": launcher.loop,
            "params": params,
            "turns": os.path.join(folder, "turns") if turns else None,
            "kept": os.path.join(folder, "kept.pt") if keeps else None,
            **{name: getattr(self._options, name) for name in ("gpus", "strategy", "precision", "compile")},
        }
        environ = launchers.environment(launcher.launcher, ranks, self._inherited, self._folder)
        command = launcher.command(ranks, gpu=self._options.gpu)
        return TrainingRun(command, config, ranks, {**environ, **launcher.variables}, folder)

    def _measure_kills(self, names: Sequence[str]) -> None:
        for name in names:
            if RECOVERY_LAUNCHERS[name].learns and not self._options.quick:
                self._warm_up(name)
        for number in range(1, self._options.rounds + 1):
            for name in rotated(names, number):
                self._round(name, number)

    def _warm_up(self, name: str) -> None:
        """Let phalanx learn the imports of the script."""
        with contextlib.suppress(ProcessLostError), self._training(name, _SMALL) as training:
            training.settle(1)

    def _round(self, name: str, number: int) -> None:
        left = self._options.kills
        while left:
            begun = left
            with self._training(name, self._options.params) as training:
                while left:
                    left -= 1
                    sample = self._killed(training, name, number)
                    self.results.samples.append(sample)
                    self._report(f"round {number} of {self._options.rounds}", sample)
                    if sample.failure:
                        break
            if sample.failure and left == begun - 1 and sample.rank < 0:  # it cannot start
                return

    def _killed(self, training: TrainingRun, name: str, number: int, settled: int = _SETTLED) -> KillSample:
        rank = -1
        try:
            group = training.settle(settled)
            alone = median(training.step_times())
            training.watch(RECOVERY_LAUNCHERS[name].pause)
            kill = training.kill(group, self._rng, alone or 0.0)
            rank = kill.rank
            found = training.recovered(kill)
        except ProcessLostError as lost:
            return KillSample(name, number, rank, failure=str(lost))
        return KillSample(name, number, rank, **asdict(found), step=alone)

    def _measure_goodput(self) -> None:
        """Alternate undisturbed periods and periods with a kill, in one run."""
        with self._training("phalanx", self._options.params) as training:
            for number in range(1, self._options.rounds + 1):
                group = training.settle(_SETTLED)
                undisturbed = self._steps(training)
                training.kill(group, self._rng)
                killed = self._steps(training)
                self.results.pairs.append(GoodputSample(number, undisturbed, killed))
                share = killed / undisturbed if undisturbed else 0.0
                output.progress(
                    f"goodput {number}", f"{undisturbed} steps without a kill, {killed} with one: {share:.1%}"
                )

    def _steps(self, training: TrainingRun) -> int:
        begin = time.monotonic()
        training.watch(self._options.every)
        end = begin + self._options.every
        return newest_step(training.records, end) - newest_step(training.records, begin)

    def _measure_ready(self) -> None:
        """Start all runs; while one does some steps, the others wait for their turn."""
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
        for place, case in enumerate(READY):
            for name, times in taken.items():
                seconds = tuple(time[place] / self._options.steps for time in times)
                self.results.ready.append(step.StepTimes(case, name, seconds))
        output.progress("ready", f"{self._options.turns} turns of {self._options.steps} steps on {ranks} ranks")

    def _measure_faults(self) -> None:
        """Kill ranks of one run until it fails, or the number of faults is reached."""
        with self._training("phalanx", _SMALL) as training:
            for number in range(1, self._options.faults + 1):
                sample = self._killed(training, "phalanx", number, settled=3)
                self.results.faults.append(sample)
                if sample.failure or number % 50 == 0 or number == self._options.faults:
                    self._report(f"fault {number}", sample)
                if sample.failure:
                    return

    def _report(self, title: str, sample: KillSample) -> None:
        took = f"failed: {sample.failure}" if sample.failure else f"{sample.whole:6.3f} s, {sample.lost} steps lost"
        output.progress(title, f"{sample.contender:<12}rank {sample.rank:<4}{took}")


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench recover` and return its exit code."""
    options = _parser().parse_args(argv)
    if options.quick:
        options.rounds, options.kills, options.params, options.every = 1, 1, _SMALL, 1.0
        options.turns, options.faults = 3, 2
    for name in ("ranks", "params", "rounds", "kills", "turns", "steps", "faults", "every"):
        if getattr(options, name) <= 0:
            raise OptionError(f"--{name} {getattr(options, name)}: it must be positive", fix=f"--{name} 2")
    parts = choices("--only", options.only, PARTS)
    names = _names(options.contenders)
    if options.strategy != "ddp" and "kill" in parts and (others := [*{*names} - {"phalanx", "spare"}]):
        raise OptionError(
            f"--strategy {options.strategy}: {', '.join(sorted(others))} can only recover with ddp here",
            fix=f"--strategy {options.strategy} --contenders phalanx,spare",
        )
    options.gpus = _gpus(options.ranks, inherited) if options.gpu else []
    before = machine_info()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        if options.quick:  # its times are not used, so torch is imported once for all runs
            for name in ("phalanx", "restart"):
                stack.enter_context(launchers.kept_warm(RECOVERY_LAUNCHERS[name].launcher, inherited, folder))
        bench = RecoverBenchmark(options, inherited, folder)
        for part in parts:
            bench.measure(part, names)
    results = bench.results
    judged = targets(results, options)
    data = {
        "torchft": _torchft(),
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "samples": [asdict(sample) for sample in results.samples],
        "rows": [asdict(row) for row in rows(results.samples)],
        "goodput": [asdict(pair) for pair in results.pairs],
        "ready": [asdict(row) for row in step.rows(results.ready)],
        "faults": [asdict(sample) for sample in results.faults],
        "failures": results.failures,
        "targets": [asdict(target) for target in judged],
    }
    output.write_json(options.json, "recover", before, data)
    _show(results, judged, options.strategy)
    return 1 if results.failures or any_missed(judged) else 0


def _show(results: RecoverResults, judged: Sequence[Target], strategy: str) -> None:
    console = output.make_console()
    if results.samples:
        title = "A rank is killed: seconds until the last rank has reached each point, median and min..max"
        points = ("first\ncollective", "state\nrestored", "next step,\nany rank", "next step,\nall ranks")
        others = ("undisturbed\nstep", "in steps", "steps\nrepeated")
        table = output.make_table(title, ("",), ("recovered", *points, *others))
        for row in rows(results.samples):
            times = (_spread(times) for times in (row.met, row.ready, row.first, row.whole))
            alone = "-" if row.step is None else f"{row.step:.3f}"
            share = "-" if row.steps is None else f"{row.steps:.1f}"
            label = RECOVERY_LAUNCHERS[row.contender].launcher.label
            table.add_row(label, f"{row.recovered} of {row.kills}", *times, alone, share, str(row.lost))
        console.print(table)
    for loop in step.rows(results.ready):
        if loop.ratio is not None:
            label = step.label(loop.contender, strategy)
            text = f"{label}: {loop.milliseconds:.2f} ms per step, {loop.ratio:.4f} of raw PyTorch"
            output.print_line(console, "no faults", f"{loop.case}, {text}")
    output.print_targets(console, judged)
    for sample in (*results.samples, *results.faults):
        if sample.failure:
            text = f"{RECOVERY_LAUNCHERS[sample.contender].launcher.label}, round {sample.round}: {sample.failure}"
            output.print_line(console, "failed", text)
    for failure in results.failures:
        output.print_line(console, "failed", failure)


def _torchft() -> str:
    """Return the version of torchft; two distributions have a package of that name."""
    names = importlib.metadata.packages_distributions().get("torchft", [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else "not installed"


def _spread(times: Sequence[float]) -> str:
    middle = median(times)
    return "-" if middle is None else f"{middle:.2f}\n{times[0]:.2f}..{times[-1]:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench recover",
        description="What the death of a rank costs: time from its SIGKILL to the next committed step, compared with "
        "torchrun and torchft; goodput; overhead without faults; many faults in a row.",
    )

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")

    number("ranks", 4, "processes")
    number("params", 10_000_000, "parameters of the model")
    number("rounds", 2, "starts of each contender, and periods of goodput")
    number("kills", 3, "kills per round")
    number("turns", 40, "turns of each run that is compared without faults")
    number("steps", 2, "steps per turn")
    number("faults", 20, "faults in a row")
    number("seed", 1, "random seed of the kills")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between kills for goodput (10)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help=f"parts: {', '.join(PARTS)} (all)")
    parser.add_argument(
        "--contenders", default="", metavar="A,B", help=f"of {', '.join(RECOVERY_LAUNCHERS)} (those installed)"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="NCCL ranks, each with a GPU or MIG slice, instead of CPU ranks"
    )
    parser.add_argument(
        "--strategy",
        choices=("ddp", "fsdp", "hsdp"),
        default="ddp",
        help="how the model is wrapped (ddp); with another one, --contenders phalanx,spare",
    )
    parser.add_argument("--precision", choices=("bf16",), help="mixed precision")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--quick", action="store_true", help="one kill each with a tiny model, to see whether it runs")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser


def _gpus(ranks: int, environ: Mapping[str, str]) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each rank."""
    found = [device.handle for device in nvidia.survey(environ).visible]
    if len(found) < ranks:
        raise OptionError(
            f"--gpu with {ranks} ranks: only {len(found)} GPUs or MIG slices are usable",
            fix=f"--gpu --ranks {len(found)}" if found else "leave --gpu out",
        )
    return found[:ranks]


def _names(text: str) -> tuple[str, ...]:
    if text:
        names = choices("--contenders", text, RECOVERY_LAUNCHERS)
        for name in names:
            launchers.check_installed(RECOVERY_LAUNCHERS[name].launcher)
        return names
    wanted = [name for name, one in RECOVERY_LAUNCHERS.items() if not one.opt_in]
    here = tuple(name for name in wanted if importlib.util.find_spec(RECOVERY_LAUNCHERS[name].launcher.package))
    for name in wanted:
        if name not in here:
            output.progress(
                "left out", f"{name}: not installed (pip install {RECOVERY_LAUNCHERS[name].launcher.package})"
            )
    return here
