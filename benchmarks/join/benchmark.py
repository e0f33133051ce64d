"""How long do N nodes take to join, and what does it cost the leader?

Times are from the first call of a member until the last one is in the leader's roster. All members call at once, over
real sockets of this machine, and authenticate; only their workers are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import select
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import output
from benchmarks.common.machine import machine_info
from benchmarks.common.options import positive_numbers
from benchmarks.common.paths import ROOT
from benchmarks.common.targets import Target
from benchmarks.join import nodes
from phalanx.errors import OptionError

LIMIT, TARGET_SIZE = 10.0, 4096  # seconds, members
_ONE_PROCESS = 512  # more members than this run in two processes


@dataclass(frozen=True)
class JoinSample:
    """One rendezvous. A failed one has a reason and no time."""

    members: int
    round: int
    seconds: float | None = None
    cpu: float | None = None  # seconds of the leader since its start
    memory: int | None = None  # bytes by which the leader grew
    members_cpu: float | None = None  # seconds of all members
    failure: str = ""


class _FailedError(Exception):
    pass


class _Process:
    """A process of benchmarks.join.nodes: sends and receives lines of JSON."""

    def __init__(self, role: str, environ: Mapping[str, str]) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", nodes.__name__, role],
            env=environ,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, **what: object) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(what).encode() + b"\n")
                self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        out = self._process.stdout
        if out is None or not select.select([out], [], [], nodes.TIMEOUT + 30)[0]:
            raise _FailedError(f"the {self.role} did not answer")
        line = out.readline()
        if not line:
            raise _FailedError(f"the {self.role} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def measure(members: int, number: int, environ: Mapping[str, str]) -> JoinSample:
    """Let `members` members join a new leader, as part of round `number`."""
    with contextlib.ExitStack() as stack:

        def start(role: str) -> _Process:
            process = _Process(role, environ)
            stack.callback(process.close)
            return process

        try:
            return _join(
                start("leader"), [start("members") for _ in range(1 + (members > _ONE_PROCESS))], members, number
            )
        except _FailedError as error:
            return JoinSample(members, number, failure=str(error))


def _join(leader: _Process, groups: Sequence[_Process], members: int, number: int) -> JoinSample:
    token = secrets.token_hex(32)
    leader.send(token=token, members=members)
    port = leader.receive()["port"]
    for turn, group in enumerate(groups):
        group.send(token=token, port=port, ids=list(range(1 + turn, members + 1, len(groups))))
    for group in groups:
        group.receive()
    for group in groups:
        group.send()
    complete = leader.receive()
    called = [group.receive() for group in groups]
    leader.send()
    lost = [why for process in (*groups, leader) for why in process.receive()["lost"]]
    failures = [complete["failure"], *(why for group in called for why in group["failures"]), *lost]
    failure = next(filter(None, failures), "")
    if failure:
        return JoinSample(members, number, failure=failure)
    return JoinSample(
        members,
        number,
        seconds=round(complete["complete"] - min(group["start"] for group in called), 4),
        cpu=round(complete["cpu"], 3),
        memory=complete["memory"],
        members_cpu=round(sum(group["cpu"] for group in called), 3),
    )


@dataclass(frozen=True)
class JoinRow:
    """The medians of all rounds with this many members."""

    members: int
    failed: int
    seconds: float | None
    each: float | None  # milliseconds per member
    growth: float | None  # of `each`, relative to the fewest members from 256 on; 1 is linear
    cpu: float | None
    memory: float | None
    members_cpu: float | None


def rows(samples: Sequence[JoinSample]) -> list[JoinRow]:
    """Return one row per number of members."""
    found = []
    for members in sorted({sample.members for sample in samples}):
        of_size = [sample for sample in samples if sample.members == members]
        seconds = _median([sample.seconds for sample in of_size])
        found.append(
            JoinRow(
                members,
                failed=sum(1 for sample in of_size if sample.failure),
                seconds=seconds,
                each=None if seconds is None else round(seconds / members * 1000, 4),
                growth=None,
                cpu=_median([sample.cpu for sample in of_size]),
                memory=_median([sample.memory for sample in of_size]),
                members_cpu=_median([sample.members_cpu for sample in of_size]),
            )
        )
    # With few members the time is that of the first connection, which is unrelated to growth.
    base = next((row.each for row in found if row.members >= 256 and row.each is not None), None)
    return [_grown(row, base) for row in found]


def _grown(row: JoinRow, base: float | None) -> JoinRow:
    if base is None or row.each is None or row.members < 256:
        return row
    return JoinRow(**{**asdict(row), "growth": round(row.each / base, 3)})


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def target(found: Sequence[JoinRow]) -> Target:
    """Judge the time of TARGET_SIZE members."""
    what = f"{TARGET_SIZE:,} members join within {LIMIT:.0f} s"
    row = next((row for row in found if row.members == TARGET_SIZE), None)
    if row is None or row.seconds is None or row.failed:
        return Target(what, "not part of this run" if row is None else f"{row.failed} rounds failed", None)
    return Target(what, f"{row.seconds:.2f} s", row.seconds <= LIMIT)


def _show(found: Sequence[JoinRow], samples: Sequence[JoinSample]) -> None:
    console = output.make_console()
    title = "From the first call until all members are in the roster: medians"
    columns = ("members", "seconds", "ms per member", "of linear", "leader CPU s", "leader growth", "members CPU s")
    table = output.make_table(title, (), columns)
    for row in found:
        memory = "-" if row.memory is None else f"{row.memory / 2**20:.1f} MiB"
        numbers = (row.seconds, row.each, row.growth, row.cpu)
        table.add_row(f"{row.members:,}", *map(_text, numbers), memory, _text(row.members_cpu))
    console.print(table)
    output.print_targets(console, [target(found)])
    for sample in samples:
        if sample.failure:
            text = f"{sample.members} members, round {sample.round}: {sample.failure}"
            output.print_line(console, "failed", text)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench join` and return its exit code."""
    options = _parser().parse_args(argv)
    members = positive_numbers("--members", options.members, "16,256")
    if options.rounds < 1:
        raise OptionError(f"--rounds {options.rounds}: at least 1 is needed", fix="--rounds 3")
    before = machine_info()
    samples = []
    for number in range(1, options.rounds + 1):
        for size in members:
            samples.append(measure(size, number, inherited))
            took = samples[-1].failure or f"{samples[-1].seconds:.2f} s"
            sys.stderr.write(f"round {number} of {options.rounds}   {size:>6} members   {took}\n")
    found = rows(samples)
    results = {
        "settings": {"members": members, "rounds": options.rounds},
        "samples": [asdict(sample) for sample in samples],
        "rows": [asdict(row) for row in found],
        "targets": [asdict(target(found))],
    }
    output.write_json(options.json, "join", before, results)
    _show(found, samples)
    return 1 if any(sample.failure for sample in samples) or target(found).met is False else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench join",
        description="Time until N nodes (real members over real sockets of this machine, without workers) have joined "
        "a leader, and what it costs the leader.",
    )
    parser.add_argument(
        "--members", default="16,256,1024,4096", metavar="N,N", help="numbers of members (16,256,1024,4096)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (3)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser
