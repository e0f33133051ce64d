"""sharded.py FOLDER HOW FAULTS [SHARDS]: a sharded training whose ranks kill themselves: [[step, rank, place], …].

HOW: fsdp, hsdp; with "keep" behind it, `run.keep` comes before `run.wrap`. Each fault happens once, those of one step
and place at the same time. Places:

commit    right after the step, before its snapshot is copied
backward  in the middle of the next step, when the snapshot of the step is complete
node      the same, but the rank waits until someone kills its node
prepared  in the middle of the next step, when all ranks have their gradients; the replica of the rank notices that its
          group is lost before its update, the others after it
kept      between `run.keep` and `run.wrap`, in a group that resumes at this step
wrapping  while the model is sharded in a run that resumes at this step: its replica has not sharded all parts either,
          the others have

Each rank writes the steps at which it entered `train`, and how; at the end, its parameters and what it printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.utils.data import TensorDataset

import phalanx

FOLDER, FAULTS = Path(sys.argv[1]), json.loads(sys.argv[3])
HOW, _, FIRST = sys.argv[2].partition(" ")
OPTIONS: dict[str, Any] = {"shards": int(sys.argv[4])} if len(sys.argv) > 4 else {}
WIDTH = 800  # more than is copied at once


def copied(ranks: int) -> bool:
    """A snapshot includes all ranks, also those on the lost node."""
    return all((FOLDER / f"copied {rank}").exists() for rank in range(ranks))


def die(run: phalanx.Run, place: str) -> None:
    for number, (step, rank, where) in enumerate(FAULTS):
        if place == where == "node" and step == run.steps and run._snapshots.snapshots is not None:
            run._snapshots.snapshots.wait()
            (FOLDER / f"copied {run.rank}").touch()
        if (step, rank, where) == (run.steps, run.rank, place):
            if place != "commit" and run._snapshots.snapshots is not None:
                run._snapshots.snapshots.wait()
            while place == "node" and run._snapshots.snapshots is not None and not copied(run.world_size):
                time.sleep(0.001)
            try:
                os.close(os.open(FOLDER / f"fault {number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            at_once = [other for other, fault in enumerate(FAULTS) if (fault[0], fault[2]) == (step, place)]
            while not all((FOLDER / f"fault {other}").exists() for other in at_once):
                time.sleep(0.001)
            if place != "node":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The all_reduce of a two-phase commit ends differently in the ranks of a fault."""
    result, run = reduce(tensor, *args, **options), Dies.run
    if tensor.numel() != 1:
        return result
    die(run, "prepared")
    for number, (step, rank, where) in enumerate(FAULTS):
        if where == "prepared" and (step, (rank + 2) % 4) == (run.steps, run.rank):
            others = [other for other in range(4) if other not in (rank, run.rank)]
            while not all((FOLDER / f"committed {number} {other}").exists() for other in others):
                time.sleep(0.001)
            raise RuntimeError("Connection closed by peer")
    return result


def committed(run: phalanx.Run) -> None:
    for number, (step, _, _) in enumerate(FAULTS):
        if step + 1 == run.steps:
            (FOLDER / f"committed {number} {run.rank}").touch()


reduce, dist.all_reduce = dist.all_reduce, all_reduce


def fully_shard(*args: Any, **options: Any) -> Any:
    run = Dies.run
    for step, rank, where in FAULTS if isinstance(args[0], Net) and not run.group.generation else ():
        others = [other for other in range(4) if other not in (rank, (rank + 2) % 4)]
        if where == "wrapping" and run.steps == step and run.rank not in others:
            while not all((FOLDER / f"wrapped {other}").exists() for other in others):
                time.sleep(0.001)
            if run.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("Connection closed by peer")
    return shard(*args, **options)


shard, fsdp.fully_shard = fsdp.fully_shard, fully_shard


class Dies(torch.autograd.Function):
    run: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        die(Dies.run, "backward")
        die(Dies.run, "node")
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Dies.apply(torch.tanh(self.second(torch.tanh(self.first(x))))))


def train(run: phalanx.Run) -> None:
    torch.set_num_threads(1)
    Dies.run = run
    chance = torch.Generator().manual_seed(5)
    data = run.loader(
        TensorDataset(torch.randn(96, 16, generator=chance), torch.randn(96, 3, generator=chance)),
        global_batch=12,
        shuffle=True,
    )
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if FIRST == "keep":
        run.keep(model=model, opt=opt, data=data)
        die(run, "kept")
    net = run.wrap(model, HOW, **OPTIONS)
    (FOLDER / f"wrapped {run.rank}").touch()
    if FIRST != "keep":
        run.keep(model=model, opt=opt, data=data)
    source = "living" if run._recovery.from_peers else "memory" if run._recovery.from_snapshot else "new"
    with open(FOLDER / f"begun.{run.rank}", "a") as file:
        file.write(f"{run.steps} {source} {run.world_size}\n")
    for _ in run.epochs(2):
        for x, y in run.batches(data):
            run.backward(nn.functional.mse_loss(net(x), y))
            if run._snapshots.snapshots is not None:
                run._snapshots.snapshots.wait()
            run.step(opt)
            committed(run)
            die(run, "commit")
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    values = model.last.bias.full_tensor().tolist()
    (FOLDER / f"end.{run.rank}").write_text(json.dumps([run.steps, found.hexdigest(), values]))


phalanx.main(train)
