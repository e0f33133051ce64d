"""`python -m tests.faithful.exits --exits 1000`: does every process end, and with the right code?

Scripts as users write them, each ended in another way, with other processes keeping the machine busy. A run that does
not end has its stacks printed. One exit is the end of one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.faithful.kinds import Kind
from tests.faithful.outcome import Outcome
from tests.faithful.runs import LIMIT, WAYS, Lane

ENDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ends")
BURN = "while True: pass"


@dataclass(frozen=True)
class End(Kind):
    """A script of the folder ends/, and the exit code of its run."""

    scripts: str = ENDS
    code: int = 0


ALL = (
    End("ddp_destroyed"),
    End("ddp_not_destroyed"),
    End("dropped_before"),
    End("dropped_after"),
    End("destroyed_twice"),
    End("exit_in_function", code=3),
    End("exception_in_function", code=1),
    End("several_groups"),
    End("ddp_and_rpc"),
    End("accelerated", needs=("accelerate",)),
    End("fabricated", needs=("lightning",)),
    End("hf_trainer", needs=("transformers", "accelerate")),
    End("compiled"),
    End("pending_work"),
    End("daemon_thread"),
    End("other_thread"),
    End("atexit_group"),
    End("loader_workers"),
    End("children"),
    End("shm_backend"),
    End("mpi_backend", ranks=1, needs=("mpi4py",)),  # without mpirun, MPI makes a world of one
    End("os_exit"),
    End("group_of_others"),
    End("never_joined"),
    End("monitored"),
    End("sharded"),
    End("gradient_hooks"),
)


@dataclass
class Count:
    """The runs of one end under one launcher."""

    runs: int = 0
    hangs: int = 0
    wrong: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, end: End, outcome: Outcome, how: str) -> None:
        self.runs += 1
        self.seconds += outcome.seconds
        if outcome.code is None:
            self.hangs += 1
            self.notes.append(f"{end.name}, {how}: does not end\n{outcome.note}")
        elif outcome.code != end.code:
            self.wrong += 1
            errors = "\n".join(text[-1500:] for name, text in outcome.streams.items() if name.endswith("stderr"))
            self.notes.append(f"{end.name}, {how}: exit code {outcome.code}, not {end.code}\n{errors}")

    @property
    def failed(self) -> int:
        return self.hangs + self.wrong

    def __str__(self) -> str:
        mean = self.seconds / max(1, self.runs)
        return f"{self.runs:6}{self.hangs:7}{self.wrong:7}{mean:9.1f}"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many cores busy."""
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def count(end: End, lane: Lane, runs: int, theirs: int, ways: Sequence[str]) -> tuple[Count, Count]:
    """Return phalanx's count and torchrun's. The ways alternate."""
    ours, torchrun = Count(), Count()
    for way, _ in zip(itertools.cycle(ways), range(runs), strict=False):
        ours.add(end, lane.phalanx(end, way), way)
    for _ in range(theirs):
        torchrun.add(end, lane.torchrun(end), "torchrun")
    return ours, torchrun


def main(argv: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faithful.exits", description=__doc__)
    parser.add_argument("--exits", type=int, default=1000, metavar="N", help="ends of ranks in all (default: 1000)")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="processes that burn a core (default: 2)")
    parser.add_argument("--only", metavar="NAME,…", help="these scripts only")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="WAY,…", help="take turns; default: %(default)s")
    parser.add_argument("--torchrun", type=int, metavar="N", help="runs of each under torchrun (default: a fifth)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help="idle after this, a run hangs (default: 60)"
    )
    args = parser.parse_args(argv)
    ends = [end for end in ALL if not args.only or end.name in args.only.split(",")]
    usable = [end for end in ends if not end.missing()]
    runs = max(1, round(args.exits / sum(end.ranks for end in usable)))
    theirs = max(1, runs // 5) if args.torchrun is None else args.torchrun
    ours, torchrun = Count(), Count()
    started = time.monotonic()
    say(f"{'':23}{'phalanx':>29}{'torchrun':>29}")
    say(f"{'end':23}" + f"{'runs':>6}{'hangs':>7}{'wrong':>7}{'seconds':>9}" * 2)
    with busy(args.busy), Lane(args.limit) as lane:
        for end in ends:
            if end.missing():
                say(f"{end.name:23}  skipped: not installed: {', '.join(end.missing())}")
                continue
            pair = count(end, lane, runs, theirs, args.ways.split(","))
            say(f"{end.name:23}{pair[0]}{pair[1]}")
            for total, one in zip((ours, torchrun), pair, strict=True):
                total.runs, total.hangs = total.runs + one.runs, total.hangs + one.hangs
                total.wrong, total.seconds = total.wrong + one.wrong, total.seconds + one.seconds
                for note in one.notes:
                    say(f"{note}\n")
    say(f"{'all':23}{ours}{torchrun}")
    exits = runs * sum(end.ranks for end in usable)
    say(f"{exits} exits, {time.monotonic() - started:.0f} s: {ours.hangs} runs hang, {ours.wrong} have a wrong code")
    return 1 if ours.failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
