"""`phalanx bench comm`: starts ranks, here or wherever phalanx run can, and measures how fast they talk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from phalanx.bench.comm import jobs, report, settings
from phalanx.bench.comm.cells import Cell, Hello, Note, Results, Word
from phalanx.bench.comm.jobs import Job
from phalanx.bench.comm.settings import Settings
from phalanx.bench.comm.traffic import COPY, write_size
from phalanx.cluster import nvidia
from phalanx.errors import OptionError

RANKS = "2,4"
# Options of phalanx run that mean other machines: -g is then theirs, as phalanx run reads it.
_ELSEWHERE = (
    *("--hosts", "--hostfile", "--nnodes", "--nodes", "-n", "--master", "--master-addr", "--node-rank", "--id", "-i"),
    *("--rdzv-endpoint", "--rdzv-backend", "--rdzv-id"),
)


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    options, where = _parser().parse_known_args(argv)
    elsewhere = any(word.partition("=")[0] in _ELSEWHERE for word in where)
    gpus = 0 if elsewhere else len(nvidia.survey(inherited).visible)
    wanted = settings.read(options, jobs.usual(gpus, mpi=not where))
    report.check(options)
    jobs.check(wanted, where)
    if elsewhere:
        given = ("-g", options.slots) if options.slots else ()
        started = [Job(wanted, None, (*given, *where))]
    else:
        started = [Job(wanted, ranks, tuple(where)) for ranks in _numbers(options.slots or _usual_ranks(wanted, gpus))]
    before = report.about(wanted)
    results = Results()
    failures = []
    for job in started:
        progress = _Progress(results)
        if failure := job.run(inherited, progress.hear):
            failures.append(f"{f'{job.ranks} ranks: ' if job.ranks else ''}{failure}")
    if elsewhere and not failures and not results.hellos:
        sys.stderr.write("the results are where node 0 is\n")
        return 0
    code = report.finish(results, options, before)
    for failure in failures:
        sys.stdout.write(f"{'failed':<14}{failure}\n")
    return 1 if failures else code


class _Progress:
    """A line on standard error whenever another size begins."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._last: tuple[object, ...] = ()

    def hear(self, word: Word) -> None:
        self._results.add(word)
        match word:
            case Hello():
                sys.stderr.write(f"{word.ranks} ranks: {', '.join(word.backends)}\n")
            case Note():
                sys.stderr.write(f"{word.text}\n")
            case Cell() if word.operation != COPY and (word.ranks, word.dtype, word.size) != self._last:
                self._last = (word.ranks, word.dtype, word.size)
                size = f"{write_size(word.size)} of {word.dtype}" if word.size else "barrier"
                sys.stderr.write(f"{word.ranks} ranks, {size}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench comm",
        description="How fast ranks talk to each other: every collective and point to point, backends side by side in "
        "one run, results checked. Bandwidths are those of nccl-tests. Exit code 1: something came out wrong, or a "
        "promise was not kept.",
        epilog="Any other option is one of phalanx run: phalanx bench comm --hosts a,b -g 8 --backends nccl",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-g",
        "--slots",
        default="",
        metavar="N,N",
        help=f"ranks, one run for each ({RANKS}; GPUs: all); with --hosts: of each",
    )
    settings.add(
        parser,
        "shm, regions: shm with tensors in memory that all have mapped, gloo, mpi, mpi4py: MPI without torch; "
        "as far as they are there; with GPUs nccl",
    )
    report.add(parser)
    return parser


def _usual_ranks(wanted: Settings, gpus: int) -> str:
    from phalanx.bench.comm.cells import device_of

    return str(gpus) if gpus and any(device_of(name) == "cuda" for name in wanted.backends) else RANKS


def _numbers(text: str) -> Sequence[int]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise OptionError(f'-g "{text}" is not a list of numbers from 1 on', fix="-g 2,4")
    return numbers
