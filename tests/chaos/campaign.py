"""Runs the rounds of a kind of fault. A round is a seed and a number: the same faults on every machine.

After every round this must hold: the parameters are bit-identical to those of an undisturbed run, each sample counted
once per epoch, everything ended in time, and no process, shared memory or temporary file is left.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import oracle
from tests.kit import leaks
from tests.kit.cli import Env, warm_environment


@dataclass(frozen=True)
class Round:
    """The input of one round of a kind: make `faults` faults as determined by `chance`."""

    chance: random.Random
    faults: int
    folder: Path  # empty
    env: Env  # of a warm fork server


@dataclass
class RoundResult:
    """The result of a round."""

    faults: int = 0
    recovered: int = 0
    seconds: list[float] = field(default_factory=list)  # of each fault, to the next committed step
    slow: list[str] = field(default_factory=list)  # what happened in runs with a very slow recovery


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `run_round` raises AssertionError for a violation."""

    name: str
    faults: int  # of the whole campaign
    per_round: int
    run_round: Callable[[Round], RoundResult]
    what: str  # for readers of the table
    needs_root: bool = False

    def rounds(self, share: float) -> list[int]:
        """Return the number of faults of each round, for this share of the campaign: at least one fault."""
        count = max(1, round(self.faults * share))
        return [min(self.per_round, count - done) for done in range(0, count, self.per_round)]


@dataclass(frozen=True)
class Violation:
    """A round with a violation."""

    kind: str
    seed: int
    number: int
    faults: int
    trace: str

    def __str__(self) -> str:
        words = f"--kind {self.kind} --seed {self.seed} --round {self.number} --faults {self.faults}"
        return (
            f"{self.kind}, seed {self.seed}, round {self.number}:\n{self.trace}repeat it: python -m tests.chaos {words}"
        )


@dataclass
class Outcome:
    """The results of the rounds of a kind."""

    kind: str
    seed: int
    result: RoundResult = field(default_factory=RoundResult)
    rounds: int = 0
    took: float = 0.0  # seconds
    violations: list[Violation] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.result.seconds) if self.result.seconds else math.nan

    @property
    def worst(self) -> float:
        return max(self.result.seconds, default=math.nan)

    def __str__(self) -> str:
        times = f"median {self.median:.2f} s, worst {self.worst:.2f} s" if self.result.seconds else "no times"
        wrong = f"; {len(self.violations)} violations" if self.violations else ""
        return f"{self.kind}: {self.result.faults} faults, {self.result.recovered} recovered, {times}{wrong}"


Places = Callable[[], contextlib.AbstractContextManager[Env]]


def _warm() -> contextlib.AbstractContextManager[Env]:
    return warm_environment("torch._dynamo")


def run(kind: Kind, seed: int, rounds: Iterable[tuple[int, int]], *, most: int = 3, places: Places = _warm) -> Outcome:
    """Run rounds, given as number and faults, until `most` had a violation. `places`: the environment of commands."""
    outcome = Outcome(kind.name, seed)
    began = time.monotonic()
    for number, faults in rounds:
        outcome.rounds += 1
        try:
            result = _run_round(kind, random.Random(f"{seed}/{kind.name}/{number}"), faults, places)
        except Exception:
            outcome.result.faults += faults
            outcome.violations.append(Violation(kind.name, seed, number, faults, traceback.format_exc(limit=-4)))
            if len(outcome.violations) >= most:
                break
        else:
            outcome.result.faults += result.faults
            outcome.result.recovered += result.recovered
            outcome.result.seconds += result.seconds
            outcome.result.slow += [f"{kind.name}, seed {seed}, round {number}: {text}" for text in result.slow]
    outcome.took = time.monotonic() - began
    return outcome


def _run_round(kind: Kind, chance: random.Random, faults: int, places: Places) -> RoundResult:
    with places() as env, tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        before = leaks.Before(str(env["TMPDIR"]))
        try:
            with oracle.using(env):
                result = kind.run_round(Round(chance, faults, Path(folder), env))
        except BaseException:
            before.clean(before.leaks())
            raise
        left = before.leaks()
        before.clean(left)
        assert not left, "\n".join(map(str, left))
    assert result.recovered == result.faults, f"{result.recovered} of {result.faults} faults were recovered"
    return result


def report(outcomes: Iterable[Outcome]) -> bool:
    """Print a table, slow recoveries, and violations. Return whether there were no violations."""
    outcomes = list(outcomes)
    print(f"\n{'kind':<18}{'faults':>7}{'recovered':>11}{'median':>10}{'worst':>10}{'took':>9}  violations")
    for one in outcomes:
        times = f"{one.median:>8.2f} s{one.worst:>8.2f} s" if one.result.seconds else f"{'-':>10}{'-':>10}"
        print(
            f"{one.kind:<18}{one.result.faults:>7}{one.result.recovered:>11}{times}{one.took:>7.0f} s  "
            f"{len(one.violations) or 'none'}"
        )
    total = [sum(getattr(one.result, name) for one in outcomes) for name in ("faults", "recovered")]
    print(f"{'all':<18}{total[0]:>7}{total[1]:>11}{'':20}{sum(one.took for one in outcomes):>7.0f} s")
    sys.stdout.flush()
    for text in (text for one in outcomes for text in one.result.slow):
        print(f"\nslow: {text}")
    for one in outcomes:
        for violation in one.violations:
            print(f"\n{violation}", file=sys.stderr)
    return not any(one.violations for one in outcomes)
