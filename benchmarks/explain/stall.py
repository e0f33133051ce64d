"""How fast is a stalled rank diagnosed? Times are from the end of --stall-timeout to the verdict with all stacks."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.common import launchers
from benchmarks.common.launchers import LAUNCHERS
from benchmarks.common.paths import script
from benchmarks.common.processes import run_logged
from benchmarks.common.targets import Target
from phalanx.contract import events

LIMIT = 3.0  # seconds


@dataclass(frozen=True)
class StallSample:
    """One run in which a rank stalls."""

    ranks: int
    seconds: float = 0.0  # from the end of --stall-timeout to the verdict
    verdict: str = ""
    failure: str = ""


def measure(ranks: int, after: float, inherited: Mapping[str, str]) -> StallSample:
    """Run a training in which one rank stalls. `--on-hang stop` ends it after the verdict."""
    blamed = ranks // 2
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        mark = os.path.join(folder, "stopped")
        hang = ("--stall-timeout", str(after), "--on-hang", "stop")
        command = [sys.executable, "-P", "-m", "phalanx", "run", "-g", str(ranks), "--cpu", *hang, script("stall.py")]
        environ = launchers.environment(LAUNCHERS["phalanx"], ranks, inherited, folder)
        failure = run_logged([*command, str(blamed), mark], environ, folder)
        verdicts = [event for event in _events(environ["PHALANX_HOME"]) if isinstance(event, events.VerdictEvent)]
        if not verdicts or not os.path.exists(mark):
            return StallSample(ranks, failure=f"no verdict: {failure or 'the run succeeded'}")
        with open(mark) as file:
            stopped = float(file.read())
    if verdicts[0].ranks != (blamed,):
        return StallSample(ranks, failure=f"wrong verdict: {verdicts[0].text}")
    return StallSample(ranks, round(verdicts[0].time - stopped - after, 2), verdicts[0].text)


def _events(home: str) -> Iterator[events.AnyEvent]:
    for name in os.listdir(os.path.join(home, "runs")):
        with open(os.path.join(home, "runs", name, "events.jsonl"), "rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield events.decode(line)


def target(found: Sequence[StallSample]) -> Target:
    """Judge the median time."""
    what = f"{found[0].ranks} ranks, one stalls: diagnosed within {LIMIT:.0f} s of --stall-timeout"
    failures = [one.failure for one in found if one.failure]
    if failures:
        return Target(what, failures[0], None)
    seconds = sorted(one.seconds for one in found)
    spread = f"median of {len(seconds)}, {seconds[0]:.2f} to {seconds[-1]:.2f} s"
    return Target(what, f"{statistics.median(seconds):.2f} s ({spread})", statistics.median(seconds) <= LIMIT)


def measure_all(options: argparse.Namespace, inherited: Mapping[str, str]) -> list[StallSample]:
    """Run all stalls, one after the other."""
    found = []
    for _ in range(options.stalls):
        found.append(measure(options.ranks, options.stall_timeout, inherited))
        one = found[-1]
        sys.stderr.write(f"{one.ranks} ranks: {one.failure or f'{one.seconds:.2f} s: {one.verdict}'}\n")
    return found
