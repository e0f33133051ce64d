"""How long does training stand still for a checkpoint?

Beside one copy of the state in memory, which is the least it can be: the state must not change while it is written.
The copy is torch's own, tensor by tensor, with as many threads, into memory that is already there: the very copy that
a save has to make, so that what is over one is the price of everything else. Each rank copies all that it has. Of
what all ranks have alike, phalanx lets each copy and write a part, so with several ranks it can be less than one copy.

The first save is shown by itself: memory for the copy is taken then, and kept. While a checkpoint is written, a loop
of forward and backward goes on; how much slower its steps are than undisturbed ones is what the writing costs beside
the stall. Ways take turns, and a copy is made next to every save, so that whatever else this machine does hits all
alike; a stall is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from phalanx.bench import machine
from phalanx.bench.results import Target
from phalanx.errors import OptionError

if TYPE_CHECKING:
    import torch

    from phalanx.worker.process_group.group import WorkerProcessGroup

LIMIT = 1.5  # copies
COPY, OURS, SAVE, ASYNC = "one copy in memory", "phalanx", "torch.save", "dcp.async_save"
_PEERS = 2  # rounds that others than we take part in: theirs are so much longer that fewer will do
_SIDE = 1024  # of a layer's square of weights
_NEEDED = 6  # times the state: itself, the copy, two buffers, what DCP stages, what is on its way to the disk


@dataclass(frozen=True)
class Stall:
    """One save: for how long the loop stood still, until when it was written, how slow steps were meanwhile."""

    way: str
    ranks: int
    mebibytes: int
    round: int
    stall: float
    written: float
    first: bool  # memory is taken then, and not given back
    step: float | None = None  # one while it was written; None where there was none
    alone: float | None = None  # one that nothing disturbed


@dataclass(frozen=True)
class Row:
    """All rounds of one way in one case; medians, of all but the first save."""

    way: str
    ranks: int
    mebibytes: int
    stall: float
    first: float
    written: float
    copies: float | None
    slower: float | None


def rows(stalls: Sequence[Stall]) -> list[Row]:
    found = []
    for ranks, size in sorted({(stall.ranks, stall.mebibytes) for stall in stalls}):
        case = [stall for stall in stalls if (stall.ranks, stall.mebibytes) == (ranks, size)]
        copy = _median([stall for stall in case if stall.way == COPY])
        for way in dict.fromkeys(stall.way for stall in case):
            mine = [stall for stall in case if stall.way == way]
            later = [stall for stall in mine if not stall.first] or mine
            stall = statistics.median(one.stall for one in later)
            beside = [(one.step, one.alone) for one in later if one.step is not None and one.alone is not None]
            slower = (
                statistics.median(b for b, _ in beside) / statistics.median(a for _, a in beside) if beside else None
            )
            found.append(
                Row(
                    way,
                    ranks,
                    size,
                    stall,
                    first=next((one.stall for one in mine if one.first), stall),
                    written=statistics.median(one.written for one in later),
                    copies=None if copy is None else round(stall / copy, 3),
                    slower=round(slower, 3) if slower is not None else None,
                )
            )
    return found


def _median(stalls: Sequence[Stall]) -> float | None:
    later = [stall.stall for stall in stalls if not stall.first] or [stall.stall for stall in stalls]
    return statistics.median(later) if later else None


def target(found: Sequence[Row]) -> Target:
    what = f"training stands still for at most {LIMIT} copies of the state in memory"
    ours = [row for row in found if row.way == OURS and row.copies is not None]
    if not ours:
        return Target(what, "not part of this run", None)
    evidence = ", ".join(f"{row.copies:.2f} at {_case(row)}" for row in ours)
    return Target(what, evidence, all(row.copies is not None and row.copies <= LIMIT for row in ours))


def _case(row: Row) -> str:
    return f"{row.mebibytes} MiB on {row.ranks} rank{'s' * (row.ranks > 1)}"


# -- the ways


class Pending(NamedTuple):
    """What a save leaves to be done beside the training."""

    done: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None


Way = Callable[[], Pending]  # the part that stalls


def measure(ranks: int, mebibytes: int, rounds: int, threads: int, folder: str) -> list[Stall]:
    # Once, for all ranks are forks; the second is what an optimizer imports.
    import torch
    import torch._dynamo  # noqa: F401

    from phalanx.worker.spawn.spawn import spawn

    told: list[list[Stall]] = spawn(
        _rank, ranks, (mebibytes, rounds, threads, folder), backend="gloo", timeout=60.0 * (rounds + 1)
    )
    return told[0]


def _rank(mebibytes: int, rounds: int, threads: int, folder: str) -> list[Stall]:
    """What rank 0 returns is of the slowest. Round 0 is the first save."""
    import torch

    from phalanx.worker.process_group.group import WorkerProcessGroup

    torch.set_num_threads(threads)
    group = WorkerProcessGroup.join(device="cpu")
    model, optimizer = _training(mebibytes)
    step = _step(model)
    found = []
    with ExitStack() as stack:
        copy = _copy(model, optimizer)
        ours = stack.enter_context(_ours(model, optimizer, f"{folder}/phalanx", group))
        others = {
            SAVE: _torch_save(model, optimizer, f"{folder}/torch.pt", group),
            ASYNC: _async_save(model, optimizer, f"{folder}/dcp"),
        }
        for number in range(rounds + 1):
            alone = statistics.median(_timed(step) for _ in range(5))
            ways: dict[str, Way] = {COPY: copy, OURS: ours, **(others if number <= _PEERS else {})}
            for name, way in ways.items():
                stall, written, beside = _saved(way, step, group)
                one = Stall(name, group.world_size, mebibytes, number, stall, written, number == 0, beside, alone)
                found.append(one)
                turn = f"round {number} of {rounds}" if number else "first"
                where = f"{mebibytes} MiB on {group.world_size}"
                group.print(f"{turn:<16}{where:>14}   {name:<20}{1000 * stall:9.1f} ms", file=sys.stderr)
    group.close()
    return found


def _saved(way: Way, step: Callable[[], None], group: WorkerProcessGroup) -> tuple[float, float, float | None]:
    os.sync()
    group.barrier()
    began = time.perf_counter()
    pending = way()
    stalled = time.perf_counter()
    steps = []
    while not pending.done():
        seconds = _timed(step)
        if not pending.done():  # all of it was beside the writing
            steps.append(seconds)
    pending.wait()
    times = group.max({"stall": stalled - began, "written": time.perf_counter() - began})
    return times["stall"], times["written"], statistics.median(steps) if steps else None


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _training(mebibytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and AdamW's two tensors for each of its own, which are of this size together."""
    import torch

    layers = max(1, round(mebibytes * 2**20 / (3 * 4 * _SIDE**2)))
    model = torch.nn.Sequential(*(torch.nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _step(model: torch.nn.Module) -> Callable[[], None]:
    """Forward and backward of a few layers: some milliseconds, whatever the size of the state."""
    import torch

    part = model[:4]
    batch = torch.randn(32, _SIDE)

    def step() -> None:
        part(batch).sum().backward()

    return step


def _tensors(value: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _copy(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Way:
    import torch

    sources = [*_tensors(model.state_dict()), *_tensors(optimizer.state_dict()["state"])]
    copies = [torch.zeros_like(source) for source in sources]

    def copy() -> Pending:
        for source, target in zip(sources, copies, strict=True):
            target.copy_(source)
        return Pending()

    return copy


@contextmanager
def _ours(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str, group: WorkerProcessGroup
) -> Iterator[Way]:
    from phalanx.train.checkpoint import Checkpoints

    steps = iter(range(1, 1 << 30))
    with Checkpoints(folder, group, keep_last=1) as checkpoints:
        checkpoints.open()

        def save() -> Pending:
            checkpoints.save(next(steps), {"model": model, "opt": optimizer}, metrics={"loss": 1.0})
            # Not waited for: what is left to agree on is a part of the next save's stall, as it is in a training.
            return Pending(lambda: not checkpoints.under_way)

        yield save


def _torch_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str, group: WorkerProcessGroup) -> Way:
    """Rank 0 writes, the others wait for it. Neither staged nor checksummed nor fsynced, as everybody does it."""
    import torch

    def save() -> Pending:
        if group.is_main:
            torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, path)
        group.barrier()
        return Pending()

    return save


def _async_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> Way:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    steps = iter(range(1, 1 << 30))
    own = dist.new_group(backend="gloo")  # its thread would disturb the collectives of the training

    def save() -> Pending:
        place = f"{folder}-{next(steps)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(
                {"model": model.state_dict(), "opt": optimizer.state_dict()["state"]},
                checkpoint_id=place,
                process_group=own,
            )

        def wait() -> None:
            future.result()
            dist.barrier(own)
            shutil.rmtree(place, ignore_errors=True)

        return Pending(future.done, wait)

    return save


# -- what it says


def _show(found: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    title = "Training stands still for a checkpoint: medians"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("ranks", "state", "way"):
        table.add_column(name)
    for name in ("ms still", "copies", "ms still, first", "ms until written", "steps meanwhile"):
        table.add_column(name, justify="right")
    for row in found:
        copies = "-" if row.copies is None else f"{row.copies:.2f}"
        slower = "-" if row.slower is None else f"{row.slower:.2f} x"
        times = [f"{1000 * seconds:.1f}" for seconds in (row.stall, row.first, row.written)]
        table.add_row(str(row.ranks), f"{row.mebibytes} MiB", row.way, times[0], copies, *times[1:], slower)
    console.print(table)
    judged = target(found)
    verdict = {True: "met", False: "missed", None: "not measured"}[judged.met]
    console.print(f"{verdict:<14}{judged.what}: {judged.evidence}", highlight=False, soft_wrap=True)


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:  # noqa: ARG001
    options = _parser().parse_args(argv)
    crews = _numbers("ranks", options.ranks)
    sizes = _numbers("sizes", options.sizes)
    _check_room(options.sizes, sizes[-1] * crews[-1], crews[-1])
    for name, least in (("rounds", 1), ("threads", 0)):
        if (number := getattr(options, name)) < least:
            raise OptionError(f"--{name} {number}: at least {least} is needed", fix=f"--{name} {least}")
    before = machine.machine()
    stalls = []
    for size in sizes:
        for ranks in crews:
            threads = options.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
            with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir=options.folder or None) as folder:
                stalls += measure(ranks, size, options.rounds, threads, folder)
    found = rows(stalls)
    data = {
        "benchmark": "checkpoint",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": {"sizes": sizes, "ranks": crews, "rounds": options.rounds, "threads": options.threads},
        "samples": [asdict(stall) for stall in stalls],
        "rows": [asdict(row) for row in found],
        "targets": [asdict(target(found))],
    }
    if options.json:
        with open(options.json, "w") as file:
            file.write(json.dumps(data, indent=1) + "\n")
    _show(found)
    return 1 if target(found).met is False else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench checkpoint",
        description="For how long training stands still for a checkpoint of a model with AdamW: phalanx, torch.save "
        "and dcp.async_save, beside one copy of the same state in memory, made by the same threads into memory that is "
        "already there.",
    )
    parser.add_argument("--sizes", default="64,512", metavar="MIB,MIB", help="of the state, in MiB (64,512)")
    parser.add_argument("--ranks", default="1,2", metavar="N,N", help="ranks on this machine (1,2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="medians are of so many rounds (5)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="of a rank that copy (0: the cores, divided by the ranks)"
    )
    parser.add_argument("--folder", default="", metavar="DIR", help="where to write (the folder for temporary files)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    return parser


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise OptionError(f'--{name} "{text}" is not a list of numbers from 1 on', fix=f"--{name} 1,2")
    return numbers


def _check_room(sizes: str, wanted: int, ranks: int) -> None:
    room = psutil.virtual_memory().available // (_NEEDED << 20)
    if wanted > room:
        raise OptionError(
            f"--sizes {sizes}: {ranks} ranks need {_NEEDED} times that in memory each; there is room for {room} MiB",
            fix=f"--sizes {max(1, room // ranks // 2)}",
        )
