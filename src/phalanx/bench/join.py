"""How long until N nodes have come together, and what does that cost the leader?

Time runs from the first call of a member until the last one is in the leader's roster. All members call at once, over
real sockets of this machine, and prove themselves; only their workers are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.bench import crowd, machine
from phalanx.bench.results import Target
from phalanx.errors import OptionError

LIMIT = 10.0  # seconds for the most members that were promised
PROMISED = 4096
_SHARE = 512  # members, from which on a second process of them is worth its start


@dataclass(frozen=True)
class Gathering:
    """One roll call. One that failed has a reason, and no time."""

    members: int
    round: int
    seconds: float | None = None
    cpu: float | None = None  # seconds, of the leader, from its start
    memory: int | None = None  # bytes by which the leader grew at most
    members_cpu: float | None = None  # seconds, of all members
    failure: str = ""


class _FailedError(Exception):
    pass


class _Process:
    """One of the crowd: a line in, a line out."""

    def __init__(self, role: str, environ: Mapping[str, str]) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", crowd.__name__, role], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def say(self, **what: object) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(what).encode() + b"\n")
                self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        out = self._process.stdout
        if out is None or not select.select([out], [], [], crowd.TIMEOUT + 30)[0]:
            raise _FailedError(f"the {self.role} did not answer")
        line = out.readline()
        if not line:
            raise _FailedError(f"the {self.role} ended with code {self._process.wait()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def measure(members: int, number: int, environ: Mapping[str, str]) -> Gathering:
    with contextlib.ExitStack() as stack:

        def start(role: str) -> _Process:
            process = _Process(role, environ)
            stack.callback(process.close)
            return process

        try:
            return _gather(start("leader"), [start("members") for _ in range(1 + (members > _SHARE))], members, number)
        except _FailedError as error:
            return Gathering(members, number, failure=str(error))


def _gather(leader: _Process, groups: Sequence[_Process], members: int, number: int) -> Gathering:
    token = secrets.token_hex(32)
    leader.say(token=token, members=members)
    port = leader.hear()["port"]
    for turn, group in enumerate(groups):
        group.say(token=token, port=port, ids=list(range(1 + turn, members + 1, len(groups))))
    for group in groups:
        group.hear()
    for group in groups:
        group.say()
    complete = leader.hear()
    called = [group.hear() for group in groups]
    leader.say()
    lost = [why for process in (*groups, leader) for why in process.hear()["lost"]]
    failures = [complete["failure"], *(why for group in called for why in group["failures"]), *lost]
    failure = next(filter(None, failures), "")
    if failure:
        return Gathering(members, number, failure=failure)
    return Gathering(
        members,
        number,
        seconds=round(complete["complete"] - min(group["start"] for group in called), 4),
        cpu=round(complete["cpu"], 3),
        memory=complete["memory"],
        members_cpu=round(sum(group["cpu"] for group in called), 3),
    )


# -- what it says


@dataclass(frozen=True)
class Row:
    """All rounds with this many members; medians."""

    members: int
    failed: int
    seconds: float | None
    each: float | None  # milliseconds a member
    growth: float | None  # of the time a member, over that of the smallest crowd of at least 256; 1 is linear
    cpu: float | None
    memory: float | None
    members_cpu: float | None


def rows(gatherings: Sequence[Gathering]) -> list[Row]:
    found = []
    for members in sorted({gathering.members for gathering in gatherings}):
        of_size = [gathering for gathering in gatherings if gathering.members == members]
        seconds = _median([gathering.seconds for gathering in of_size])
        found.append(
            Row(
                members,
                failed=sum(1 for gathering in of_size if gathering.failure),
                seconds=seconds,
                each=None if seconds is None else round(seconds / members * 1000, 4),
                growth=None,
                cpu=_median([gathering.cpu for gathering in of_size]),
                memory=_median([gathering.memory for gathering in of_size]),
                members_cpu=_median([gathering.members_cpu for gathering in of_size]),
            )
        )
    # Of a few members the time is that of the first connection, which says nothing about growth.
    base = next((row.each for row in found if row.members >= 256 and row.each is not None), None)
    return [_grown(row, base) for row in found]


def _grown(row: Row, base: float | None) -> Row:
    if base is None or row.each is None or row.members < 256:
        return row
    return Row(**{**asdict(row), "growth": round(row.each / base, 3)})


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def target(found: Sequence[Row]) -> Target:
    what = f"{PROMISED:,} members are together within {LIMIT:.0f} s"
    row = next((row for row in found if row.members == PROMISED), None)
    if row is None or row.seconds is None or row.failed:
        return Target(what, "not part of this run" if row is None else f"{row.failed} rounds failed", None)
    return Target(what, f"{row.seconds:.2f} s", row.seconds <= LIMIT)


def _show(found: Sequence[Row], gatherings: Sequence[Gathering]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    title = "From the first call until everybody is in the roster: medians"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    header = ("members", "seconds", "ms a member", "of linear", "leader's CPU s", "leader grew by", "members' CPU s")
    for name in header:
        table.add_column(name, justify="right")
    for row in found:
        memory = "-" if row.memory is None else f"{row.memory / 2**20:.1f} MiB"
        numbers = (row.seconds, row.each, row.growth, row.cpu)
        table.add_row(f"{row.members:,}", *map(_text, numbers), memory, _text(row.members_cpu))
    console.print(table)
    judged = target(found)
    verdict = {True: "met", False: "missed", None: "not measured"}[judged.met]
    console.print(f"{verdict:<14}{judged.what}: {judged.evidence}", highlight=False, soft_wrap=True)
    for gathering in gatherings:
        if gathering.failure:
            text = f"{gathering.members} members, round {gathering.round}: {gathering.failure}"
            console.print(f"{'failed':<14}{text}", markup=False, highlight=False, soft_wrap=True)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options = _parser().parse_args(argv)
    members = _numbers(options.members)
    if options.rounds < 1:
        raise OptionError(f"--rounds {options.rounds}: at least one is needed", fix="--rounds 3")
    before = machine.machine()
    gatherings = []
    for number in range(1, options.rounds + 1):
        for size in members:
            gatherings.append(measure(size, number, inherited))
            took = gatherings[-1].failure or f"{gatherings[-1].seconds:.2f} s"
            sys.stderr.write(f"round {number} of {options.rounds}   {size:>6} members   {took}\n")
    found = rows(gatherings)
    data = {
        "benchmark": "join",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": {"members": members, "rounds": options.rounds},
        "samples": [asdict(gathering) for gathering in gatherings],
        "rows": [asdict(row) for row in found],
        "targets": [asdict(target(found))],
    }
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    _show(found, gatherings)
    return 1 if any(gathering.failure for gathering in gatherings) or target(found).met is False else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench join",
        description="Time until N simulated nodes (real members over real sockets of this machine, without workers) "
        "have joined one leader, and what it costs the leader.",
    )
    parser.add_argument("--members", default="16,256,1024,4096", metavar="N,N", help="how many (16,256,1024,4096)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are of so many rounds (3)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise OptionError(f'--members "{text}" is not a list of numbers from 1 on', fix="--members 16,256")
    return numbers
