"""How long does training stand still for a checkpoint?

Beside one copy of the state in memory, which is the least it can be: the state must not change while it is written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil

from phalanx.bench import machine
from phalanx.bench.results import Target
from phalanx.errors import OptionError

if TYPE_CHECKING:
    import torch

LIMIT = 1.5  # copies
COPY, OURS, SAVE, ASYNC = "one copy in memory", "phalanx", "torch.save", "dcp.async_save"
_SIDE = 1024  # of a layer's square of weights
_NEEDED = 6  # times the state: itself, the copy, two buffers, what DCP stages, what is on its way to the disk


@dataclass(frozen=True)
class Stall:
    """One save: for how long the loop stood still, and until when the checkpoint was written."""

    way: str
    mebibytes: int
    round: int
    stall: float
    written: float
    first: bool  # memory is taken then, and not given back


@dataclass(frozen=True)
class Row:
    """All rounds of one way at one size; medians, of all but the first save."""

    way: str
    mebibytes: int
    stall: float
    first: float
    written: float
    copies: float | None


Way = Callable[[], Callable[[], None]]  # the part that stalls; what it returns waits for the rest


def rows(stalls: Sequence[Stall]) -> list[Row]:
    found = []
    for size in sorted({stall.mebibytes for stall in stalls}):
        copy = _median([stall for stall in stalls if (stall.way, stall.mebibytes) == (COPY, size)])
        for way in dict.fromkeys(stall.way for stall in stalls):
            mine = [stall for stall in stalls if (stall.way, stall.mebibytes) == (way, size)]
            later = [stall for stall in mine if not stall.first]
            stall = _median(mine)
            if stall is None:
                continue
            found.append(
                Row(
                    way,
                    size,
                    stall,
                    first=next((one.stall for one in mine if one.first), stall),
                    written=statistics.median(one.written for one in later or mine),
                    copies=None if copy is None else round(stall / copy, 3),
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
    evidence = ", ".join(f"{row.copies:.2f} at {row.mebibytes} MiB" for row in ours)
    return Target(what, evidence, all(row.copies is not None and row.copies <= LIMIT for row in ours))


# -- the ways


def measure(mebibytes: int, rounds: int, threads: int, folder: str) -> Iterator[Stall]:
    """Ways take turns, so that whatever else the machine does hits all alike. Round 0 is the first save."""
    import torch

    torch.set_num_threads(threads)
    model, optimizer = _training(mebibytes)
    with ExitStack() as stack:
        ways: dict[str, Way] = {
            COPY: _copy(model, optimizer),
            OURS: stack.enter_context(_ours(model, optimizer, f"{folder}/phalanx")),
            SAVE: _torch_save(model, optimizer, f"{folder}/torch.pt"),
            ASYNC: stack.enter_context(_async_save(model, optimizer, f"{folder}/dcp")),
        }
        for number in range(rounds + 1):
            for name, way in ways.items():
                os.sync()
                began = time.perf_counter()
                wait = way()
                stalled = time.perf_counter()
                wait()
                written = time.perf_counter()
                yield Stall(name, mebibytes, number, stalled - began, written - began, number == 0)


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

    def copy() -> Callable[[], None]:
        for source, target in zip(sources, copies, strict=True):
            target.copy_(source)
        return _nothing

    return copy


@contextmanager
def _ours(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> Iterator[Way]:
    from phalanx.train.checkpoint import Checkpoints

    steps = iter(range(1, 1 << 30))
    with Checkpoints(folder, keep_last=1) as checkpoints:

        def save() -> Callable[[], None]:
            checkpoints.save(next(steps), {"model": model, "opt": optimizer}, metrics={"loss": 1.0})
            return checkpoints.wait

        yield save


def _torch_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str) -> Way:
    import torch

    def save() -> Callable[[], None]:
        torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, path)
        return _nothing

    return save


@contextmanager
def _async_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> Iterator[Way]:
    import shutil

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    steps = iter(range(1, 1 << 30))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save() -> Callable[[], None]:
        place = f"{folder}-{next(steps)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = dcp.async_save(
                {"model": model.state_dict(), "opt": optimizer.state_dict()["state"]}, checkpoint_id=place
            )

        def wait() -> None:
            future.result()
            shutil.rmtree(place)

        return wait

    try:
        yield save
    finally:
        dist.destroy_process_group()


def _nothing() -> None:
    pass


# -- what it says


def _show(found: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    title = "Training stands still for a checkpoint: medians"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("state")
    table.add_column("way")
    for name in ("ms still", "copies", "ms still, first", "ms until written"):
        table.add_column(name, justify="right")
    for row in found:
        copies = "-" if row.copies is None else f"{row.copies:.2f}"
        times = [f"{1000 * seconds:.1f}" for seconds in (row.stall, row.first, row.written)]
        table.add_row(f"{row.mebibytes} MiB", row.way, times[0], copies, *times[1:])
    console.print(table)
    judged = target(found)
    verdict = {True: "met", False: "missed", None: "not measured"}[judged.met]
    console.print(f"{verdict:<14}{judged.what}: {judged.evidence}", highlight=False, soft_wrap=True)


# -- the verb


def main(argv: list[str], inherited: Mapping[str, str]) -> int:  # noqa: ARG001
    options = _parser().parse_args(argv)
    sizes = _sizes(options.sizes)
    for name in ("rounds", "threads"):
        if (number := getattr(options, name)) < 1:
            raise OptionError(f"--{name} {number}: at least one is needed", fix=f"--{name} 1")
    before = machine.machine()
    stalls = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir=options.folder or None) as folder:
            for stall in measure(size, options.rounds, options.threads, folder):
                stalls.append(stall)
                turn = "first" if stall.first else f"round {stall.round} of {options.rounds}"
                sys.stderr.write(f"{turn:<16}{size:>6} MiB   {stall.way:<20}{1000 * stall.stall:9.1f} ms\n")
    found = rows(stalls)
    data = {
        "benchmark": "checkpoint",
        "machine": {**asdict(before), "load_after": os.getloadavg()},
        "settings": {"sizes": sizes, "rounds": options.rounds, "threads": options.threads},
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
        "and dcp.async_save, beside one copy of the same state in memory.",
    )
    parser.add_argument("--sizes", default="64,512", metavar="MIB,MIB", help="of the state, in MiB (64,512)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="medians are of so many rounds (7)")
    # As a rank has that shares its machine with others; with more, each copy waits for the slowest of them.
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch that copy (1)")
    parser.add_argument("--folder", default="", metavar="DIR", help="where to write (the folder for temporary files)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results there as JSON")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise OptionError(f'--sizes "{text}" is not a list of numbers from 1 on', fix="--sizes 64,512")
    room = psutil.virtual_memory().available // (_NEEDED << 20)
    if numbers[-1] > room:
        raise OptionError(
            f"--sizes {text}: {numbers[-1]} MiB of state need {_NEEDED} times that in memory; there is room for {room}",
            fix=f"--sizes {max(1, room // 2)}",
        )
    return numbers
