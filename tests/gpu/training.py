"""A training whose ranks are killed at given places: python training.py '{"folder": …, "kills": [[20, 2, "idle"]]}'

Every rank writes each step that it commits to FOLDER/steps.PID; rank 0 writes the result to FOLDER/end.json. A kill is
[step, rank, place], and happens once. Places:

start, generation N               when `train` begins: in any group, in group N
forward, backward, optimizer, idle    in a step, or after it
assert                            before forward, a device assertion fails instead
forming                           while the others connect to a new group after an earlier kill
checkpoint, snapshot, copy        while one is written, at this step or later; copy: of a shard
handover                          while a new rank receives its shard
node                              the rank waits to be killed with its node
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

import phalanx

settings: dict[str, Any] = {
    "layers": 3,
    "width": 1024,
    "steps": 60,
    "samples": 8,
    "strategy": "ddp",
    "compile": False,
    "graph": False,  # use CUDA graphs for forward and backward
    "norm": False,  # with batch normalization, whose buffers are those of rank 0
    "ready": True,  # prepare for the death of a rank
    "precision": None,
    "checkpoints": False,
    "pause": 0.0,
    "kills": [],
    "endless": None,  # [step, rank]: once, a kernel does not end
    "slow_abort": False,  # the abort of a communicator never returns
    **json.loads(sys.argv[1]),
}
folder = Path(settings["folder"])


LATER = ("checkpoint", "snapshot", "copy", "handover")  # places that are not reached in every step


def dies(run: phalanx.Run, place: str) -> None:
    for step, rank, where in settings["kills"]:
        mark = folder / f"killed.{step}.{rank}.{where}"
        reached = run.steps >= step if place in LATER else run.steps == step
        if reached and (run.rank, place) == (rank, where) and not mark.exists():
            mark.write_text(repr(time.time()))
            if where == "node":
                signal.pause()
            if where == "assert":  # a device assertion fails, which breaks the CUDA context
                print(torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")])
            os.kill(os.getpid(), signal.SIGKILL)


def dies_in(owner: Any, name: str, place: str) -> None:
    """Make a function of phalanx a place where a rank dies."""
    plain = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if Dies.run is not None:
            dies(Dies.run, place)
        return plain(*args, **options)

    setattr(owner, name, call)


def dies_while_forming() -> None:
    """Kill a rank that has met the others, before it connects to them, in a group that forms after a kill."""
    plain = dist.init_process_group

    def form(*args: Any, **options: Any) -> Any:
        for _, rank, where in settings["kills"]:
            mark = folder / f"killed.forming.{rank}"
            later = any(folder.glob("killed.*"))
            if where == "forming" and options["rank"] == rank and later and not mark.exists():
                mark.write_text(repr(time.time()))
                time.sleep(0.3)  # the others are connecting
                os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **options)

    dist.init_process_group = form


def prepare() -> None:
    """Add the places that are inside of phalanx."""
    from phalanx.train.checkpoint.format import integrity
    from phalanx.train.elastic import tensor_transfer
    from phalanx.train.snapshot import part
    from phalanx.worker.process_group import nccl

    dies_in(part, "make_seal", "snapshot")
    dies_in(part.Writer, "copy", "copy")
    dies_in(integrity, "write_all", "checkpoint")
    dies_in(tensor_transfer, "receive", "handover")
    if any(where == "forming" for _, _, where in settings["kills"]):
        dies_while_forming()
    if settings["slow_abort"]:
        plain = nccl._abort

        def never_returns(backend: Any) -> None:
            plain(backend)
            time.sleep(1e6)

        nccl._abort = never_returns


def usage() -> str:
    """Return what this process holds: descriptors, threads, bytes of the device that are in use."""
    free, total = torch.cuda.mem_get_info()
    return f"{len(os.listdir('/proc/self/fd'))} {len(os.listdir('/proc/self/task'))} {total - free}"


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Any number of samples from a small table, so that a new rank does not wait for its data."""

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.table = torch.randn(512, width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.table[index % len(self.table)], index


class Dies(torch.autograd.Function):
    """Kills the rank in the middle of backward, when only some gradients have been sent."""

    run: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dies(Dies.run, "backward")
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = settings["width"]
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(settings["layers"]))
        self.norm = nn.BatchNorm1d(width) if settings["norm"] else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for place, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + x
            if place == len(self.layers) // 2 and not settings["compile"] and not settings["graph"]:
                x = Dies.apply(x)
        return x


def make() -> tuple[Net, torch.optim.Optimizer]:
    net = Net().to("cuda")
    if settings["graph"]:
        alike = torch.randn(settings["samples"] // int(os.environ["WORLD_SIZE"]), settings["width"], device="cuda")
        net = torch.cuda.make_graphed_callables(net, (alike,))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + whole.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def train(run: phalanx.Run) -> None:
    Dies.run = run
    steps = open(folder / f"steps.{os.getpid()}", "a", buffering=1)  # noqa: SIM115
    print(f"formed {run.rank} {run.group.generation} {time.time():.3f}", file=steps)
    print(f"holds {run.rank} {run.group.generation} {usage()} {time.time():.3f}", file=steps)
    dies(run, "start")
    dies(run, f"generation {run.group.generation}")
    data = Rows(settings["steps"] * settings["samples"], settings["width"])
    loader = run.loader(data, global_batch=settings["samples"], shuffle=True)
    model, opt = run.once(make)
    if settings["checkpoints"]:
        run.checkpoints(folder / "checkpoints", every=10)
    run.keep(model=model, opt=opt, data=loader)
    wrapping = {"compile": True} if settings["compile"] else {}
    if settings["precision"]:
        wrapping["precision"] = settings["precision"]
    net = run.wrap(model, settings["strategy"], **wrapping)
    print(f"wrapped {run.rank} {run.group.generation} {time.time():.3f}", file=steps)
    for _ in run.epochs(1):
        for x, number in run.batches(loader):
            dies(run, "forward")
            dies(run, "assert")
            dies(run, "node")
            if [run.steps, run.rank] == settings["endless"] and not (folder / "endless").exists():
                (folder / "endless").touch()
                torch.cuda._sleep(1 << 40)  # ten minutes
            loss = net(x).square().mean()
            run.backward(loss)
            dies(run, "optimizer")
            run.step(opt)
            ids = ",".join(map(str, number.tolist()))
            print(f"step {run.rank} {run.steps} {run.group.generation} {time.time():.4f} {ids}", file=steps)
            dies(run, "idle")
            if settings["pause"]:
                time.sleep(settings["pause"])
    found = digest(model)
    peak = torch.cuda.mem_get_info()
    if run.group.is_main:
        (folder / "end.json").write_text(json.dumps({"steps": run.steps, "digest": found, "memory": peak}))


if __name__ == "__main__":
    (folder / f"began.{os.getpid()}").write_text(f"{time.time():.3f}")
    if settings["ready"]:
        prepare()
        phalanx.main(train)
    else:
        run = phalanx.Run(phalanx.init())
        train(run)
        run.group.close()
