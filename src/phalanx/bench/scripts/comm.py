"""How fast these ranks talk to each other: phalanx run -g 4 -m phalanx.bench.scripts.comm --backends shm,gloo

In ranks that are started already, by phalanx run, torchrun, srun or mpirun; `phalanx bench comm` starts its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist

from phalanx.bench.comm import calls, ddp, everybody, matrix, report, settings
from phalanx.bench.comm.calls import Buffers, Copying, Party, Task, as_group
from phalanx.bench.comm.cells import Hello, Note, Results, Word, device_of, spoken
from phalanx.bench.comm.rounds import Pace, Rounds
from phalanx.bench.comm.settings import Settings
from phalanx.errors import PhalanxError
from phalanx.worker.process_group.group import WorkerProcessGroup

_LIMIT = 120.0  # seconds after which an operation is given up
_ROOM = 0.6  # of the memory that is free

Say = Callable[[Word], None]


def measure(wanted: Settings, group: WorkerProcessGroup, say: Say) -> None:
    """Every rank; what it says is the same in all of them."""
    parties, refused = calls.parties(wanted.backends, group.device, _LIMIT)
    ranks, nodes = group.world_size, group.topology.nodes
    note = partial(Note, ranks)
    me = (socket.gethostname(), str(group.device), torch.cuda.get_device_name() if group.device.type == "cuda" else "")
    people: list[tuple[str, str, str]] = everybody.told(me, tuple[str, str, str])
    say(
        Hello(
            ranks,
            tuple(tuple(node) for node in nodes),
            tuple(host for host, _, _ in people),
            tuple(gpu or device for _, device, gpu in people),
            tuple(party.name for party in parties),
            {"torch": str(torch.__version__), "python": platform.python_version()},
        )
    )
    for name, why in refused.items():
        say(note(f"{name} is not measured: {why}"))
    broken: set[str] = set()
    if "calls" in wanted.parts and parties:
        broken |= _calls(wanted, parties, group, say)
    if "pairs" in wanted.parts and ranks > 1:
        for party in (party for party in parties if party.name not in {*broken, calls.REGIONS}):
            links, failure = matrix.measure(party, nodes, wanted.seconds)
            for link in links:
                say(link)
            if failure:
                broken.add(party.name)
                say(note(f"{party.name}: links are not measured: {failure}"))
    if "ddp" in wanted.parts and ranks > 1:
        names = {"shm", calls.REGIONS, "gloo"} - broken
        groups = {party.name: as_group(party) for party in parties if party.name in names}
        if len(groups) > 1:
            for steps in ddp.measure(groups, 3 * wanted.rounds, 3 * wanted.seconds):
                say(steps)


def _calls(wanted: Settings, parties: list[Party], group: WorkerProcessGroup, say: Say) -> set[str]:
    """Backends that are of no use any more."""
    rank, ranks = group.rank, group.world_size
    rounds = Rounds(parties, Pace(wanted.rounds, wanted.seconds))
    devices = {party.device.type: party.device for party in parties}
    copying = [Copying(device) for device in devices.values()]
    if "barrier" in wanted.operations:
        small = cache(partial(Buffers.make, 1, "uint8", rank=rank, ranks=ranks))
        for cell in rounds.measure(Task("barrier", "uint8", "out", 0), small, ()):
            say(cell)
    for dtype in wanted.dtypes:
        for size in wanted.sizes:
            if not _fits(size, len(group.topology.local_ranks), devices):
                say(Note(ranks, f"{size} bytes are not measured: three times that, of every rank, is too much memory"))
                continue
            made: dict[str, Buffers] = {}

            def buffers(
                device: torch.device, size: int = size, dtype: str = dtype, made: dict[str, Buffers] = made
            ) -> Buffers:
                if device.type not in made:
                    made[device.type] = Buffers.make(size, dtype, device, rank, ranks)
                return made[device.type]

            for number, task in enumerate(calls.tasks(wanted.operations, dtype, size, in_place=wanted.in_place)):
                for cell in rounds.measure(task, buffers, () if number else copying):
                    say(cell)
    for name, why in rounds.broken.items():
        say(Note(ranks, f"{name} was given up: {why}"))
    return set(rounds.broken)


def _fits(size: int, local: int, devices: dict[str, torch.device]) -> bool:
    """For every rank: all must do the same."""
    free = []
    for device in devices.values():
        if device.type == "cuda":
            free.append(torch.cuda.mem_get_info(device)[0])
        else:
            with open("/proc/meminfo") as file:
                free.append(
                    next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")) // local
                )
    fits = torch.tensor([all(3 * size < _ROOM * room for room in free)], dtype=torch.int32)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return bool(fits.item())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m phalanx.bench.scripts.comm", description=__doc__)
    settings.add(parser, "nccl where there are GPUs, else gloo")
    report.add(parser)
    parser.add_argument("--stream", action="store_true", help="print results as lines of JSON, for phalanx bench comm")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wanted = settings.read(options, ["nccl" if torch.cuda.is_available() else "gloo"])
    on_gpu = any(device_of(name) == "cuda" for name in wanted.backends)
    group = WorkerProcessGroup.join("gloo", device=None if on_gpu else "cpu", timeout=_LIMIT)
    results = Results()
    first = group.rank == 0

    def say(word: Word) -> None:
        results.add(word)
        if first and options.stream:
            sys.stdout.write(spoken(word) + "\n")
            sys.stdout.flush()

    measure(wanted, group, say)
    code = 1 if results.wrong else 0
    if first and not options.stream:
        code = report.finish(results, options, report.about(wanted))
    dist.barrier()
    group.close()
    return code


if __name__ == "__main__":
    try:
        code = main()
    except BaseException as error:
        if isinstance(error, PhalanxError):
            sys.stderr.write(f"{error}\n")
        elif not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stderr.flush()
        # At once: MPI would wait for the others, who wait for this rank.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
    sys.exit(code)
