"""How long does a checkpoint block training?

The baseline is one copy of the state in memory, because the state must not change while it is written: torch copies
tensor by tensor, with as many threads, into memory that is already allocated. Each rank copies all its state. Of state
that all ranks hold, phalanx lets each rank copy and write a part, so with several ranks it can take less than one copy.

The first save is reported separately, because it allocates the memory for the copy. While a checkpoint is written, a
loop of forward and backward continues; how much slower its steps are is the cost of writing. The methods take turns,
with a copy next to every save. The reported time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
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

from benchmarks.common import output
from benchmarks.common.machine import machine_info
from benchmarks.common.options import positive_numbers
from benchmarks.common.targets import Target
from phalanx.errors import OptionError

if TYPE_CHECKING:
    import torch

    from phalanx.worker.process_group.group import WorkerProcessGroup

LIMIT = 1.5  # copies
COPY, OURS, SAVE, ASYNC = "one copy in memory", "phalanx", "torch.save", "dcp.async_save"
_OTHER_ROUNDS = 2  # rounds of torch.save and DCP, which take much longer
_SIDE = 1024  # width of a layer
_NEEDED = 6  # times the state: itself, the copy, two buffers, DCP's staging, the page cache


@dataclass(frozen=True)
class SaveSample:
    """One save: how long it blocked the loop, when it was written, how long steps took meanwhile."""

    method: str
    ranks: int
    mebibytes: int
    round: int
    stall: float
    written: float
    first: bool  # allocates the memory for the copy
    step: float | None = None  # seconds of a step while it was written; None if there was none
    alone: float | None = None  # seconds of a step without a save


@dataclass(frozen=True)
class CheckpointRow:
    """The medians of one method in one case, without the first save."""

    method: str
    ranks: int
    mebibytes: int
    stall: float
    first: float
    written: float
    copies: float | None
    slower: float | None


def rows(stalls: Sequence[SaveSample]) -> list[CheckpointRow]:
    """Return one row per case and method."""
    found = []
    for ranks, size in sorted({(stall.ranks, stall.mebibytes) for stall in stalls}):
        case = [stall for stall in stalls if (stall.ranks, stall.mebibytes) == (ranks, size)]
        copy = _median([stall for stall in case if stall.method == COPY])
        for method in dict.fromkeys(stall.method for stall in case):
            mine = [stall for stall in case if stall.method == method]
            later = [stall for stall in mine if not stall.first] or mine
            stall = statistics.median(one.stall for one in later)
            during = [(one.step, one.alone) for one in later if one.step is not None and one.alone is not None]
            slower = (
                statistics.median(b for b, _ in during) / statistics.median(a for _, a in during) if during else None
            )
            found.append(
                CheckpointRow(
                    method,
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


def _median(stalls: Sequence[SaveSample]) -> float | None:
    later = [stall.stall for stall in stalls if not stall.first] or [stall.stall for stall in stalls]
    return statistics.median(later) if later else None


def target(found: Sequence[CheckpointRow]) -> Target:
    """Judge how long phalanx blocks training."""
    what = f"a checkpoint blocks training for at most {LIMIT} copies of the state in memory"
    ours = [row for row in found if row.method == OURS and row.copies is not None]
    if not ours:
        return Target(what, "not part of this run", None)
    evidence = ", ".join(f"{row.copies:.2f} at {_case(row)}" for row in ours)
    return Target(what, evidence, all(row.copies is not None and row.copies <= LIMIT for row in ours))


def _case(row: CheckpointRow) -> str:
    return f"{row.mebibytes} MiB on {row.ranks} rank{'s' * (row.ranks > 1)}"


# -- the methods of saving


class PendingSave(NamedTuple):
    """The part of a save that remains when training continues."""

    done: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None


SaveMethod = Callable[[], PendingSave]  # the part that blocks training


def measure(ranks: int, mebibytes: int, rounds: int, threads: int, folder: str) -> list[SaveSample]:
    """Run all rounds of one case in `ranks` forked processes."""
    # Imported before the fork, once for all ranks. An optimizer imports torch._dynamo.
    import torch
    import torch._dynamo  # noqa: F401

    from phalanx.launcher.spawn.spawn import spawn

    results: list[list[SaveSample]] = spawn(
        _rank, ranks, (mebibytes, rounds, threads, folder), backend="gloo", timeout=60.0 * (rounds + 1)
    )
    return results[0]


def _rank(mebibytes: int, rounds: int, threads: int, folder: str) -> list[SaveSample]:
    """Run all rounds in one rank. The times are those of the slowest rank; round 0 is the first save."""
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
            methods: dict[str, SaveMethod] = {COPY: copy, OURS: ours, **(others if number <= _OTHER_ROUNDS else {})}
            for name, method in methods.items():
                stall, written, during = _saved(method, step, group)
                one = SaveSample(name, group.world_size, mebibytes, number, stall, written, number == 0, during, alone)
                found.append(one)
                turn = f"round {number} of {rounds}" if number else "first save"
                where = f"{mebibytes} MiB on {group.world_size}"
                group.print(f"{turn:<16}{where:>14}   {name:<20}{1000 * stall:9.1f} ms", file=sys.stderr)
    group.close()
    return found


def _saved(
    method: SaveMethod, step: Callable[[], None], group: WorkerProcessGroup
) -> tuple[float, float, float | None]:
    os.sync()
    group.barrier()
    began = time.perf_counter()
    pending = method()
    stalled = time.perf_counter()
    steps = []
    while not pending.done():
        seconds = _timed(step)
        if not pending.done():  # the whole step ran during the save
            steps.append(seconds)
    pending.wait()
    times = group.max({"stall": stalled - began, "written": time.perf_counter() - began})
    return times["stall"], times["written"], statistics.median(steps) if steps else None


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _training(mebibytes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and AdamW, whose state is `mebibytes` large in total."""
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
    """Return a forward and backward of a few layers: some milliseconds, independent of the size of the state."""
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


def _copy(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> SaveMethod:
    import torch

    sources = [*_tensors(model.state_dict()), *_tensors(optimizer.state_dict()["state"])]
    copies = [torch.zeros_like(source) for source in sources]

    def copy() -> PendingSave:
        for source, target in zip(sources, copies, strict=True):
            target.copy_(source)
        return PendingSave()

    return copy


@contextmanager
def _ours(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str, group: WorkerProcessGroup
) -> Iterator[SaveMethod]:
    from phalanx.train.checkpoint import Checkpoints

    steps = iter(range(1, 1 << 30))
    with Checkpoints(folder, group, keep_last=1) as checkpoints:
        checkpoints.open()

        def save() -> PendingSave:
            checkpoints.save(next(steps), {"model": model, "opt": optimizer}, metrics={"loss": 1.0})
            # Not awaited: as in training, the agreement between ranks is part of the next save.
            return PendingSave(lambda: not checkpoints.under_way)

        yield save


def _torch_save(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str, group: WorkerProcessGroup
) -> SaveMethod:
    """Rank 0 writes and the others wait, without staging, checksum or fsync, as most scripts do it."""
    import torch

    def save() -> PendingSave:
        if group.is_main:
            torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, path)
        group.barrier()
        return PendingSave()

    return save


def _async_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> SaveMethod:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    steps = iter(range(1, 1 << 30))
    own = dist.new_group(backend="gloo")  # separate from the collectives of the training loop

    def save() -> PendingSave:
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

        return PendingSave(future.done, wait)

    return save


# -- output


def _show(found: Sequence[CheckpointRow]) -> None:
    title = "A checkpoint blocks training: medians"
    columns = ("ms blocked", "copies", "ms blocked, first", "ms until written", "steps meanwhile")
    table = output.make_table(title, ("ranks", "state", "method"), columns)
    for row in found:
        copies = "-" if row.copies is None else f"{row.copies:.2f}"
        slower = "-" if row.slower is None else f"{row.slower:.2f} x"
        times = [f"{1000 * seconds:.1f}" for seconds in (row.stall, row.first, row.written)]
        table.add_row(str(row.ranks), f"{row.mebibytes} MiB", row.method, times[0], copies, *times[1:], slower)
    console = output.make_console()
    console.print(table)
    output.print_targets(console, [target(found)])


def main(argv: list[str], inherited: Mapping[str, str]) -> int:  # noqa: ARG001
    """Run `phalanx bench checkpoint` and return its exit code."""
    options = _parser().parse_args(argv)
    worlds = positive_numbers("--ranks", options.ranks, "1,2")
    sizes = positive_numbers("--sizes", options.sizes, "64,512")
    _check_room(options.sizes, sizes[-1] * worlds[-1], worlds[-1])
    for name, least in (("rounds", 1), ("threads", 0)):
        if (number := getattr(options, name)) < least:
            raise OptionError(f"--{name} {number}: at least {least} is needed", fix=f"--{name} {least}")
    before = machine_info()
    stalls = []
    for size in sizes:
        for ranks in worlds:
            threads = options.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
            with tempfile.TemporaryDirectory(prefix="phalanx-bench-", dir=options.folder or None) as folder:
                stalls += measure(ranks, size, options.rounds, threads, folder)
    found = rows(stalls)
    results = {
        "settings": {"sizes": sizes, "ranks": worlds, "rounds": options.rounds, "threads": options.threads},
        "samples": [asdict(stall) for stall in stalls],
        "rows": [asdict(row) for row in found],
        "targets": [asdict(target(found))],
    }
    output.write_json(options.json, "checkpoint", before, results)
    _show(found)
    return 1 if target(found).met is False else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench checkpoint",
        description="How long a checkpoint of a model with AdamW blocks training: phalanx, torch.save and "
        "dcp.async_save, compared with one copy of the same state into allocated memory by as many threads.",
    )
    parser.add_argument("--sizes", default="64,512", metavar="MIB,MIB", help="sizes of the state in MiB (64,512)")
    parser.add_argument("--ranks", default="1,2", metavar="N,N", help="numbers of ranks on this machine (1,2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds (5)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="copying threads per rank (0: cores divided by ranks)"
    )
    parser.add_argument("--folder", default="", metavar="DIR", help="where to write checkpoints (the temporary folder)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results to FILE as JSON")
    return parser


def _check_room(sizes: str, wanted: int, ranks: int) -> None:
    room = psutil.virtual_memory().available // (_NEEDED << 20)
    if wanted > room:
        raise OptionError(
            f"--sizes {sizes}: {ranks} ranks each need {_NEEDED} times that in memory; {room} MiB fit",
            fix=f"--sizes {max(1, room // ranks // 2)}",
        )
