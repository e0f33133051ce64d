"""How fast do ranks communicate? Starts ranks on this machine, or wherever phalanx run can, and reports results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from benchmarks.comm import jobs, settings
from benchmarks.comm.jobs import Job
from benchmarks.comm.report import output
from benchmarks.comm.results import CommNote, CommResults, Measurement, Message, WorldInfo, device_of
from benchmarks.comm.settings import CommSettings
from benchmarks.comm.traffic import COPY, format_size
from benchmarks.common.machine import machine_info
from phalanx.cluster import nvidia
from phalanx.errors import OptionError

DEFAULT_RANKS = "2,4"
# Options of phalanx run that select other hosts. With them, -g is passed to phalanx run.
_HOST_OPTIONS = (
    *("--hosts", "--hostfile", "--nnodes", "--nodes", "-n", "--master", "--master-addr", "--node-rank", "--id", "-i"),
    *("--rdzv-endpoint", "--rdzv-backend", "--rdzv-id"),
)


def main(argv: list[str], inherited: Mapping[str, str]) -> int:
    """Run `phalanx bench comm` and return its exit code."""
    options, run_options = _parser().parse_known_args(argv)
    on_hosts = any(option.partition("=")[0] in _HOST_OPTIONS for option in run_options)
    gpus = 0 if on_hosts else len(nvidia.survey(inherited).visible)
    wanted = settings.parse(options, jobs.default_backends(gpus, mpi=not run_options))
    output.check(options)
    jobs.check(wanted, run_options)
    if on_hosts:
        given = ("-g", options.slots) if options.slots else ()
        started = [Job(wanted, None, (*given, *run_options))]
    else:
        started = [
            Job(wanted, ranks, tuple(run_options)) for ranks in _numbers(options.slots or _default_ranks(wanted, gpus))
        ]
    before = machine_info()
    results = CommResults()
    failures = []
    for job in started:
        progress = _Progress(results)
        if failure := job.run(inherited, progress.receive):
            failures.append(f"{f'{job.ranks} ranks: ' if job.ranks else ''}{failure}")
    if on_hosts and not failures and not results.worlds:
        sys.stderr.write("node 0 prints the results\n")
        return 0
    code = output.finish(results, options, before, wanted)
    for failure in failures:
        sys.stdout.write(f"{'failed':<14}{failure}\n")
    return 1 if failures else code


class _Progress:
    """Prints a line to standard error when another size starts."""

    def __init__(self, results: CommResults) -> None:
        self._results = results
        self._last: tuple[object, ...] = ()

    def receive(self, message: Message) -> None:
        self._results.add(message)
        match message:
            case WorldInfo():
                sys.stderr.write(f"{message.ranks} ranks: {', '.join(message.backends)}\n")
            case CommNote():
                sys.stderr.write(f"{message.text}\n")
            case Measurement() if (
                message.operation != COPY and (message.ranks, message.dtype, message.size) != self._last
            ):
                self._last = (message.ranks, message.dtype, message.size)
                size = f"{format_size(message.size)} of {message.dtype}" if message.size else "barrier"
                sys.stderr.write(f"{message.ranks} ranks, {size}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench comm",
        description="Latency and bandwidth of every collective, point-to-point operation and link, for several "
        "backends in one run; all results are verified. Bandwidths are defined as in nccl-tests. Exit code 1: a result "
        "is wrong, or a target was missed.",
        epilog="All other options are those of phalanx run: phalanx bench comm --hosts a,b -g 8 --backends nccl",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-g",
        "--slots",
        default="",
        metavar="N,N",
        help=f"numbers of ranks, one run each ({DEFAULT_RANKS}; with GPUs: all of them); with --hosts: ranks per host",
    )
    settings.add_arguments(
        parser,
        "those that are available of shm, regions (shm with tensors in memory that all ranks have mapped), gloo, mpi, "
        "mpi4py (MPI without torch); with GPUs nccl",
    )
    output.add_arguments(parser)
    return parser


def _default_ranks(wanted: CommSettings, gpus: int) -> str:
    return str(gpus) if gpus and any(device_of(name) == "cuda" for name in wanted.backends) else DEFAULT_RANKS


def _numbers(text: str) -> Sequence[int]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise OptionError(f'-g "{text}" is not a list of positive integers', fix="-g 2,4")
    return numbers
