"""Measured: a training whose ranks are killed from outside, written for each contender, which tells how far it is.

python recover.py '{"loop": "plain", "params": 10000000, "marks": FIFO, "turns": PREFIX or null, "kept": FILE or null}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_WIDTH = 1000
_BATCH = 4  # so few that a step is mostly its parameters
_SAMPLES = 1 << 16


class Marks:
    """Into a pipe, a line each: less than the kernel would ever cut in two."""

    def __init__(self, told: dict[str, Any], rank: int) -> None:
        self._rank = rank
        self._pipe = os.open(told["marks"], os.O_WRONLY)
        turns = told.get("turns")
        self._turns = os.open(f"{turns}.{rank}", os.O_RDWR) if turns else None

    def tell(self, what: str, group: int, step: int = 0) -> None:
        now = time.monotonic()  # one clock for all processes of a machine
        spent = time.process_time()
        os.write(self._pipe, f"{what} {self._rank} {os.getpid()} {group} {step} {now:.6f} {spent:.6f}\n".encode())

    def wait(self) -> None:
        """For the turn of this training, where several take turns: a byte is a step."""
        if self._turns is not None:
            os.read(self._turns, 1)


def network(params: int, device: Any = "cpu") -> nn.Module:
    """Made on its device: to initialize 100 million parameters takes 0.8 s on a CPU, and a new rank would wait."""
    width = min(_WIDTH, max(1, int(params**0.5)))
    layers = max(1, round(params / (width * (width + 1))))
    return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))


def dataset(params: int) -> TensorDataset:
    """As long as one likes, and no time goes into making it. What is asked for cannot be learnt: gradients that vanish
    would make the processor slow, at a time that depends on chance."""
    width = min(_WIDTH, max(1, int(params**0.5)))
    return TensorDataset(torch.ones(1, width).expand(_SAMPLES, -1), torch.randn(_SAMPLES, 1).expand(-1, width))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


loss_of = nn.functional.mse_loss


# -- phalanx: the ranks that are left regroup


def through_main(told: dict[str, Any]) -> None:
    import phalanx

    marks: list[Marks] = []  # one a process, however often it is entered

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(told["params"], torch.accelerator.current_accelerator() if told["gpus"] else "cpu")
        return model, adamw(model)

    def train(run: phalanx.Run) -> None:
        if not marks:
            marks.append(Marks(told, run.rank))
        mark = marks[0]
        mark.tell("met", run.generation)
        model, opt = run.once(make)
        data = run.loader(dataset(told["params"]), batch_size=_BATCH, shuffle=True)
        run.keep(model=model, opt=opt, data=data)
        ddp = run.wrap(model)
        mark.tell("ready", run.generation)
        for _ in run.epochs(1 << 30):
            batches = iter(run.batches(data))
            while True:
                mark.wait()
                batch = next(batches, None)
                if batch is None:
                    break
                x, y = batch
                loss = loss_of(ddp(x), y)
                run.backward(loss)
                run.step(opt, loss=loss)
                mark.tell("step", run.generation, run.steps)

    phalanx.main(train, device=None if told["gpus"] else "cpu")


# -- raw DDP, as a careful user writes it: with "kept", a checkpoint every step


def plain(told: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    device = own_device(told["gpus"])
    dist.init_process_group("nccl" if told["gpus"] else "gloo")
    rank, attempt, kept = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), told.get("kept")
    marks = Marks(told, rank)
    dist.all_reduce(torch.ones(1, device=device))
    marks.tell("met", attempt)
    model = network(told["params"], device)
    opt = adamw(model)
    step = 0
    if kept and os.path.exists(kept):
        state = torch.load(kept, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        step = state["step"]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = dataset(told["params"])
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=_BATCH, sampler=sampler, drop_last=True)
    marks.tell("ready", attempt)
    for x, y in endless(loader, sampler):
        marks.wait()
        loss_of(ddp(x.to(device)), y.to(device)).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if device.type == "cuda":
            torch.cuda.synchronize()  # or the step is not there yet
        if kept and rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, f"{kept}.new")
            os.replace(f"{kept}.new", kept)
        marks.tell("step", attempt, step)


def own_device(gpus: list[str]) -> torch.device:
    """Of a plain script. torchrun does not know MIG slices, nor what NCCL wants of ranks that share a GPU."""
    if not gpus:
        return torch.device("cpu")
    if "PHALANX_RUN" not in os.environ and gpus[0].startswith("MIG"):
        local = int(os.environ["LOCAL_RANK"])
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpus[local], "NCCL_HOSTID": f"rank {local}", "NCCL_SOCKET_IFNAME": "=lo"}
        os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def endless(loader: Iterable[Any], sampler: Any) -> Iterator[Any]:
    for epoch in range(1 << 30):
        sampler.set_epoch(epoch)
        yield from loader


# -- torchft: as its example of DDP has it, a process a replica group


def torchft(told: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torchft import (  # type: ignore[import-not-found,unused-ignore]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )
    from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found,unused-ignore]

    replica = int(os.environ["REPLICA_GROUP_ID"])
    marks = Marks(told, replica)
    model = network(told["params"])

    def load(state: dict[str, Any]) -> None:
        wrapped.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])

    def save() -> dict[str, Any]:
        return {"model": wrapped.state_dict(), "opt": opt.state_dict()}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"recover_{replica}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    wrapped = DistributedDataParallel(manager, model)
    opt = Optimizer(manager, adamw(model))
    loader = DataLoader(dataset(told["params"]), batch_size=_BATCH, shuffle=True, drop_last=True)
    marks.tell("ready", 0)
    while True:
        for x, y in loader:
            before = manager.current_step()
            opt.zero_grad()
            loss_of(wrapped(x), y).backward()
            opt.step()
            if manager.current_step() > before:  # else the step did not count
                marks.tell("step", manager._quorum_id, manager.current_step())


LOOPS = {"phalanx": through_main, "plain": plain, "torchft": torchft}


def main() -> None:
    told = json.loads(sys.argv[1])
    LOOPS[told["loop"]](told)


main()
