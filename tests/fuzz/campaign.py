"""Runs the cases of a target. A seed and a number define a case: the same input on every machine."""

from __future__ import annotations

import contextlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# `check(chance, note)`: make one input from `chance`, `note` it, and raise if phalanx handles it wrongly.
Check = Callable[[random.Random, Callable[[object], None]], None]


@dataclass(frozen=True)
class Target:
    """A reader of outside input. `open` prepares it, and yields the check of one case."""

    name: str
    cases: int  # in the whole campaign
    open: Callable[[], contextlib.AbstractContextManager[Check]]


@dataclass(frozen=True)
class Finding:
    """A case that failed."""

    target: str
    seed: int
    number: int
    tried: str
    trace: str

    def __str__(self) -> str:
        return (
            f"{self.target}, seed {self.seed}, case {self.number}:\n{self.tried}\n{self.trace}"
            f"repeat it: python -m tests.fuzz --target {self.target} --seed {self.seed} --case {self.number}"
        )


@dataclass(frozen=True)
class Outcome:
    """The result of the cases of a target."""

    target: str
    cases: int
    cpu: float  # seconds
    findings: tuple[Finding, ...]


def run(target: Target, seed: int, numbers: Iterable[int], *, most: int = 5) -> Outcome:
    """Run these cases, until `most` have failed."""
    findings: list[Finding] = []
    began, count = time.process_time(), 0
    with target.open() as check:
        for number in numbers:
            count += 1
            tried: list[object] = []
            try:
                check(random.Random(f"{seed}/{target.name}/{number}"), tried.append)
            except Exception:
                shown = "\n".join(repr(one)[:4000] for one in tried)
                trace = traceback.format_exc(limit=-8)
                findings.append(Finding(target.name, seed, number, shown, trace))
                if len(findings) >= most:
                    break
    return Outcome(target.name, count, time.process_time() - began, tuple(findings))


def report(outcomes: Iterable[Outcome]) -> bool:
    """Print a table and the failures. Return whether all cases passed."""
    outcomes = list(outcomes)
    print(f"{'target':<16}{'cases':>9}{'CPU':>8}  failed")
    for one in outcomes:
        print(f"{one.target:<16}{one.cases:>9,}{one.cpu:>6.0f} s  {len(one.findings) or 'none'}")
    cases, cpu = sum(one.cases for one in outcomes), sum(one.cpu for one in outcomes)
    print(f"{'all':<16}{cases:>9,}{cpu:>6.0f} s")
    for one in outcomes:
        for finding in one.findings:
            print(f"\n{finding}", file=sys.stderr)
    return not any(one.findings for one in outcomes)
