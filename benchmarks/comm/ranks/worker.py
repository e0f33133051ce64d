"""Measures everything in one rank, and sends the results. See scripts/comm.py."""

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

from benchmarks.comm import settings
from benchmarks.comm.ranks import ddp, link_speeds
from benchmarks.comm.ranks.available import open_backends
from benchmarks.comm.ranks.backends import REGIONS, Backend, CopyBackend, TorchBackend
from benchmarks.comm.ranks.exchange import all_gather_json
from benchmarks.comm.ranks.operations import Buffers, Task, tasks
from benchmarks.comm.ranks.rounds import RoundRunner, RoundSettings
from benchmarks.comm.report import output
from benchmarks.comm.results import CommNote, CommResults, Message, WorldInfo, device_of, encode
from benchmarks.comm.settings import CommSettings
from benchmarks.common.machine import machine_info
from phalanx.errors import PhalanxError
from phalanx.worker.process_group.group import WorkerProcessGroup

_TIMEOUT = 120.0  # seconds, of an operation
_MEMORY = 0.6  # share of the free memory that may be used

Send = Callable[[Message], None]


def measure(wanted: CommSettings, group: WorkerProcessGroup, send: Send) -> None:
    """Measure everything in every rank; all send the same messages."""
    backends, unavailable = open_backends(wanted.backends, group.device, _TIMEOUT)
    ranks, nodes = group.world_size, group.topology.nodes
    note = partial(CommNote, ranks)
    me = (socket.gethostname(), str(group.device), torch.cuda.get_device_name() if group.device.type == "cuda" else "")
    hosts: list[tuple[str, str, str]] = all_gather_json(me, tuple[str, str, str])
    send(
        WorldInfo(
            ranks,
            tuple(tuple(node) for node in nodes),
            tuple(host for host, _, _ in hosts),
            tuple(gpu or device for _, device, gpu in hosts),
            tuple(backend.name for backend in backends),
            {"torch": str(torch.__version__), "python": platform.python_version()},
        )
    )
    for name, why in unavailable.items():
        send(note(f"{name} is not measured: {why}"))
    broken: set[str] = set()
    if "calls" in wanted.parts and backends:
        broken |= _calls(wanted, backends, group, send)
    if "pairs" in wanted.parts and ranks > 1:
        for backend in (backend for backend in backends if backend.name not in {*broken, REGIONS}):
            links, failure = link_speeds.measure(backend, nodes, wanted.seconds)
            for link in links:
                send(link)
            if failure:
                broken.add(backend.name)
                send(note(f"{backend.name}: links are not measured: {failure}"))
    if "ddp" in wanted.parts and ranks > 1:
        names = {"shm", REGIONS, "gloo"} - broken
        groups = {one.name: one.group for one in backends if isinstance(one, TorchBackend) and one.name in names}
        if len(groups) > 1:
            for steps in ddp.measure(groups, 3 * wanted.rounds, 3 * wanted.seconds):
                send(steps)


def _calls(wanted: CommSettings, backends: list[Backend], group: WorkerProcessGroup, send: Send) -> set[str]:
    """Measure all operations; return the backends that are broken now."""
    rank, ranks = group.rank, group.world_size
    rounds = RoundRunner(backends, RoundSettings(wanted.rounds, wanted.seconds))
    devices = {backend.device.type: backend.device for backend in backends}
    copies = [CopyBackend(device) for device in devices.values()]
    if "barrier" in wanted.operations:
        small = cache(partial(Buffers.allocate, 1, "uint8", rank=rank, ranks=ranks))
        for measurement in rounds.measure(Task("barrier", "uint8", "out", 0), small, ()):
            send(measurement)
    for dtype in wanted.dtypes:
        for size in wanted.sizes:
            if not _fits(size, len(group.topology.local_ranks), devices):
                send(CommNote(ranks, f"{size} bytes are not measured: every rank needs three times that in memory"))
                continue
            made: dict[str, Buffers] = {}

            def buffers(
                device: torch.device, size: int = size, dtype: str = dtype, made: dict[str, Buffers] = made
            ) -> Buffers:
                if device.type not in made:
                    made[device.type] = Buffers.allocate(size, dtype, device, rank, ranks)
                return made[device.type]

            for number, task in enumerate(tasks(wanted.operations, dtype, size, in_place=wanted.in_place)):
                for measurement in rounds.measure(task, buffers, () if number else copies):
                    send(measurement)
    for name, why in rounds.broken.items():
        send(CommNote(ranks, f"{name} failed: {why}"))
    return set(rounds.broken)


def _fits(size: int, local: int, devices: dict[str, torch.device]) -> bool:
    """Return whether tensors of `size` bytes fit into the memory of every rank."""
    free = []
    for device in devices.values():
        if device.type == "cuda":
            free.append(torch.cuda.mem_get_info(device)[0])
        else:
            with open("/proc/meminfo") as file:
                free.append(
                    next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")) // local
                )
    fits = torch.tensor([all(3 * size < _MEMORY * room for room in free)], dtype=torch.int32)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return bool(fits.item())


def main() -> int:
    """Measure, and report results from rank 0."""
    parser = argparse.ArgumentParser(prog="comm.py", description=__doc__)
    settings.add_arguments(parser, "nccl with GPUs, otherwise gloo")
    output.add_arguments(parser)
    parser.add_argument("--stream", action="store_true", help="print results as lines of JSON, for phalanx bench comm")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wanted = settings.parse(options, ["nccl" if torch.cuda.is_available() else "gloo"])
    on_gpu = any(device_of(name) == "cuda" for name in wanted.backends)
    group = WorkerProcessGroup.join("gloo", device=None if on_gpu else "cpu", timeout=_TIMEOUT)
    results = CommResults()
    first = group.rank == 0

    def send(message: Message) -> None:
        results.add(message)
        if first and options.stream:
            sys.stdout.write(encode(message) + "\n")
            sys.stdout.flush()

    measure(wanted, group, send)
    code = 1 if results.wrong else 0
    if first and not options.stream:
        code = output.finish(results, options, machine_info(), wanted)
    dist.barrier()
    group.close()
    return code


def run() -> int:
    """Run `main`; if it fails, end the process at once, because MPI would wait for ranks that wait for this one."""
    try:
        return main()
    except BaseException as error:
        if isinstance(error, PhalanxError):
            sys.stderr.write(f"{error}\n")
        elif not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
