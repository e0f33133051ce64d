"""`python -m tests.faithful`: prints a row per kind, with its differences. Exits with 1 if there are any."""

from __future__ import annotations

import argparse
import concurrent.futures
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.faithful import known
from tests.faithful.kinds import BY_NAME, KINDS, Kind
from tests.faithful.outcome import Difference, Outcome, differences
from tests.faithful.runs import LIMIT, WAYS, Lane

TURNS = 2  # phalanx learns from the first run of a script what the second imports before the fork


@dataclass(frozen=True)
class Compared:
    way: str
    turn: int
    outcome: Outcome
    new: list[Difference]
    known: list[tuple[Difference, str]]

    @property
    def word(self) -> str:
        if self.outcome.code is None and self.new:
            return "HANGS"
        return f"{len(self.new)} DIFFER" if self.new else "known" if self.known else "same"


@dataclass(frozen=True)
class Row:
    kind: Kind
    expected: Outcome
    runs: list[Compared]

    @property
    def same(self) -> bool:
        return self.expected.code is not None and not any(run.new for run in self.runs)


def compare(kind: Kind, lane: Lane, ways: Sequence[str] = tuple(WAYS), turns: int = TURNS) -> Row:
    """Run it once under torchrun, and twice in a row under phalanx in each way."""
    expected = lane.torchrun(kind)
    runs = []
    for way in ways:
        for turn in range(1, turns + 1):
            outcome = lane.phalanx(kind, way)
            found = [(one, known.reason(kind.name, way, one)) for one in differences(expected, outcome)]
            new = [one for one, why in found if why is None]
            runs.append(Compared(way, turn, outcome, new, [(one, why) for one, why in found if why is not None]))
    return Row(kind, expected, runs)


def rows(kinds: Sequence[Kind], ways: Sequence[str], jobs: int, limit: float) -> Iterator[Row]:
    """Yield the rows when they are ready."""
    lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()

    def one(kind: Kind) -> Row:
        lane = lanes.get()
        try:
            return compare(kind, lane, ways)
        finally:
            lanes.put(lane)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        made = [Lane(limit) for _ in range(jobs)]
        try:
            for lane in made:
                lanes.put(lane)
            for future in concurrent.futures.as_completed([pool.submit(one, kind) for kind in kinds]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
            for lane in made:
                lane.__exit__()


def heading(ways: Sequence[str]) -> str:
    names = "".join(f"{way} {turn}".ljust(11) for way in ways for turn in range(1, TURNS + 1))
    return f"{'kind':20}{'code':>6}{'seconds':>9}  {names}"


def text(row: Row, full: bool = False) -> Iterator[str]:
    """Return the row of the table, with the differences."""
    code = "-" if row.expected.code is None else row.expected.code
    words = "".join(run.word.ljust(11) for run in row.runs)
    yield f"{row.kind.name:20}{code:>6}{row.expected.seconds:>9.1f}  {words}".rstrip()
    if row.expected.code is None:
        yield "    torchrun itself does not end" + (f"\n{row.expected.note}" if full else "")
    reported: set[Difference] = set()
    for run in row.runs:
        if run.outcome.note and (full or run.outcome.code is not None):  # the stacks of a run that hangs are long
            yield f"    {run.way} {run.turn}: {run.outcome.note}"
        for one in run.new:
            if one not in reported:
                yield f"    {run.way} {run.turn}: {one.field}: {one.brief}"
                if full:
                    yield one.text
            reported.add(one)
        for one, why in run.known:
            if full and one not in reported:
                yield f"    {run.way} {run.turn}: {one.field}, known: {why}"
            reported.add(one)


def main(argv: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faithful", description=__doc__)
    parser.add_argument("--kinds", type=int, metavar="N", help="the first N kinds only")
    parser.add_argument("--only", metavar="NAME,…", help="these kinds only")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="WAY,…", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="kinds at the same time (default: 1)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help="idle after this, a run hangs (default: 60)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="each difference in full")
    args = parser.parse_args(argv)
    kinds = [BY_NAME[name] for name in args.only.split(",")] if args.only else list(KINDS[: args.kinds])
    ways = args.ways.split(",")
    started = time.monotonic()
    say(heading(ways))
    failed, runs = [], 0
    for kind in kinds:
        if kind.missing():
            say(f"{kind.name:20}  skipped: not installed: {', '.join(kind.missing())}")
    for row in rows([kind for kind in kinds if not kind.missing()], ways, args.jobs, args.limit):
        runs += 1 + len(row.runs)
        failed += [] if row.same else [row.kind.name]
        for line in text(row, args.verbose):
            say(line)
    say(f"{len(kinds)} kinds, {runs} runs, {time.monotonic() - started:.0f} s: {len(failed)} differ {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
