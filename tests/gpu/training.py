"""A training whose ranks are killed at given places: python training.py '{"folder": …, "kills": [[20, 2, "idle"]]}'

Every rank writes each step that it commits to FOLDER/steps.PID; rank 0 writes the result to FOLDER/end.json. A kill is
[step, rank, place], and happens once. Places: start, forward, backward, optimizer, idle; assert: before forward, a
device assertion fails instead.
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
    "ready": True,  # prepare for the death of a rank
    "precision": None,
    "checkpoints": False,
    "pause": 0.0,
    "kills": [],
    **json.loads(sys.argv[1]),
}
folder = Path(settings["folder"])


def dies(run: phalanx.Run, place: str) -> None:
    for step, rank, where in settings["kills"]:
        mark = folder / f"killed.{step}.{rank}.{where}"
        if (run.steps, run.rank, place) == (step, rank, where) and not mark.exists():
            mark.write_text(repr(time.time()))
            if where == "assert":  # a device assertion fails, which breaks the CUDA context
                print(torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")])
            os.kill(os.getpid(), signal.SIGKILL)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
    dies(run, "start")
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
        phalanx.main(train)
    else:
        run = phalanx.Run(phalanx.init())
        train(run)
        run.group.close()
