"""How soon is it said who is wrong? From the moment that the alarm is due to the verdict, stacks and all."""

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

from phalanx.bench import contenders, step
from phalanx.bench.contenders import CONTENDERS
from phalanx.bench.results import Target
from phalanx.contract import events

LIMIT = 3.0  # seconds

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts", "stall.py")


@dataclass(frozen=True)
class Stall:
    ranks: int
    seconds: float = 0.0  # from the threshold to the verdict
    verdict: str = ""
    failure: str = ""


def measure(ranks: int, after: float, inherited: Mapping[str, str]) -> Stall:
    """One run, which is ended by its verdict."""
    culprit = ranks // 2
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        mark = os.path.join(folder, "stopped")
        hang = ("--stall-timeout", str(after), "--on-hang", "stop")
        line = [sys.executable, "-m", "phalanx", "run", "-g", str(ranks), "--cpu", *hang, _SCRIPT, str(culprit), mark]
        environ = contenders.environment(CONTENDERS["phalanx"], ranks, inherited, folder)
        said = step.run(line, environ, folder)
        told = [event for event in _events(environ["PHALANX_HOME"]) if isinstance(event, events.VerdictEvent)]
        if not told or not os.path.exists(mark):
            return Stall(ranks, failure=f"no verdict: {said or 'the run ended well'}")
        with open(mark) as file:
            stopped = float(file.read())
    if told[0].ranks != (culprit,):
        return Stall(ranks, failure=f"the wrong one: {told[0].text}")
    return Stall(ranks, round(told[0].time - stopped - after, 2), told[0].text)


def _events(home: str) -> Iterator[events.AnyEvent]:
    for name in os.listdir(os.path.join(home, "runs")):
        with open(os.path.join(home, "runs", name, "events.jsonl"), "rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield events.decode(line)


def target(found: Sequence[Stall]) -> Target:
    what = f"{found[0].ranks} ranks, one stops: named within {LIMIT:.0f} s of --stall-timeout"
    failures = [one.failure for one in found if one.failure]
    if failures:
        return Target(what, failures[0], None)
    seconds = sorted(one.seconds for one in found)
    spread = f"median of {len(seconds)}, {seconds[0]:.2f} to {seconds[-1]:.2f} s"
    return Target(what, f"{statistics.median(seconds):.2f} s ({spread})", statistics.median(seconds) <= LIMIT)


def measured(options: argparse.Namespace, inherited: Mapping[str, str]) -> list[Stall]:
    found = []
    for _ in range(options.stalls):
        found.append(measure(options.ranks, options.stall_timeout, inherited))
        one = found[-1]
        sys.stderr.write(f"{one.ranks} ranks: {one.failure or f'{one.seconds:.2f} s: {one.verdict}'}\n")
    return found
