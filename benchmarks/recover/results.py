"""What `phalanx bench recover` has measured, as rows per contender, and the targets that these are compared with."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.common.ratios import median
from benchmarks.common.targets import Target
from benchmarks.recover.launchers import RECOVERY_LAUNCHERS
from benchmarks.training import step

# Targets. The first three are seconds to the next step: CPU ranks, NCCL ranks, with a spare.
RECOVERY, RECOVERY_GPU, RECOVERY_SPARE = 0.3, 1.0, 0.5
COLLECTIVE = 1.5  # seconds to the first collective of a restarted plain script
GOODPUT = 0.9  # share of undisturbed steps
# By wall-clock time, and by the CPU time of all ranks, which depends less on other load.
READY = ("ready for faults", "ready for faults, in CPU time")


@dataclass(frozen=True)
class KillSample:
    """One kill. Times are in seconds from it; one that was not recovered from has a reason and no times."""

    contender: str
    round: int
    rank: int = -1
    first: float | None = None
    whole: float | None = None
    met: float | None = None
    ready: float | None = None
    step: float | None = None  # seconds of an undisturbed step before the kill
    lost: int = 0
    failure: str = ""


@dataclass(frozen=True)
class GoodputSample:
    """Steps in a period without a kill, and in a period of the same length that starts with one."""

    round: int
    undisturbed: int
    killed: int


@dataclass(frozen=True)
class RecoveryRow:
    """All kills of a contender, with sorted times."""

    contender: str
    kills: int
    recovered: int
    first: tuple[float, ...]
    whole: tuple[float, ...]
    met: tuple[float, ...]
    ready: tuple[float, ...]
    step: float | None
    steps: float | None  # undisturbed steps that fit into the recovery time
    lost: int


@dataclass
class RecoverResults:
    """The results of all parts, and why parts could not be measured."""

    samples: list[KillSample] = field(default_factory=list)
    pairs: list[GoodputSample] = field(default_factory=list)
    ready: list[step.StepTimes] = field(default_factory=list)
    faults: list[KillSample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def rows(samples: Sequence[KillSample]) -> list[RecoveryRow]:
    """Return one row per contender."""
    found = []
    for name in RECOVERY_LAUNCHERS:
        mine = [sample for sample in samples if sample.contender == name]
        fine = [sample for sample in mine if not sample.failure]
        if mine:
            found.append(
                RecoveryRow(
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


def targets(results: RecoverResults, options: argparse.Namespace) -> list[Target]:
    """Judge all targets."""
    found = {row.contender: row for row in rows(results.samples)}
    size = f"{options.ranks} ranks, {options.params:,} parameters with AdamW"
    ours = found.get("phalanx")
    limit = RECOVERY_GPU if options.gpu else RECOVERY
    judged = [
        _below(f"from a kill to the next committed step, {size}: below {limit} s", ours, "whole", limit),
        _none_lost(ours),
        _below(
            f"restarted plain script: below {COLLECTIVE} s to its first collective",
            found.get("restart"),
            "met",
            COLLECTIVE,
        ),
        _goodput(results.pairs, options.every),
    ]
    if "spare" in found:
        judged.insert(
            1, _below(f"the same with a spare: below {RECOVERY_SPARE} s", found["spare"], "whole", RECOVERY_SPARE)
        )
    ready = step.targets(step.rows(results.ready), options.strategy)
    if not ready:
        what = f"a step, {READY[0]}: at most {step.LIMIT} of {step.baseline(options.strategy)}"
        ready = [Target(what, "not part of this run", None)]
    judged += ready
    over = sum(not sample.failure for sample in results.faults)
    what = f"{options.faults} faults in a row: all recovered"
    evidence = f"{over} of {options.faults}" if results.faults else "not part of this run"
    return [*judged, Target(what, evidence, over == options.faults if results.faults else None)]


def _none_lost(row: RecoveryRow | None) -> Target:
    what = "no committed step is lost"
    if row is None or not row.recovered:
        return Target(what, "not part of this run" if row is None else "no recovery", None)
    return Target(what, f"{row.lost} in {row.recovered} recoveries", row.lost == 0)


def _below(what: str, row: RecoveryRow | None, field: str, limit: float) -> Target:
    if row is None:
        return Target(what, "not part of this run", None)
    times = getattr(row, field)
    middle = median(times)
    if middle is None or row.recovered < row.kills:
        return Target(what, f"{row.recovered} of {row.kills} recovered", False)
    return Target(what, f"{middle:.3f} s ({times[0]:.3f}..{times[-1]:.3f})", middle < limit)


def _goodput(pairs: Sequence[GoodputSample], every: float) -> Target:
    what = f"steps with a kill every {every:g} s: at least {GOODPUT:.0%} of undisturbed ones"
    shares = sorted(pair.killed / pair.undisturbed for pair in pairs if pair.undisturbed)
    middle = median(shares)
    if middle is None:
        return Target(what, "not part of this run", None)
    return Target(what, f"{middle:.1%} ({shares[0]:.1%}..{shares[-1]:.1%})", middle >= GOODPUT)
