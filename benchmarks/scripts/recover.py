"""Train while ranks are killed from outside, and report progress; one training loop per contender.

python recover.py '{"loop": "plain", "params": 10000000, "progress": FIFO, "turns": PREFIX|null, "kept": FILE|null,
                    "gpus": [], "strategy": "ddp"|"fsdp"|"hsdp", "precision": "bf16"|null, "compile": false}'
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
_BATCH = 4  # small, so that the parameters dominate the time of a step
_SAMPLES = 1 << 16


class ProgressWriter:
    """Writes one line per event into a pipe; the kernel does not split such short lines."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self._rank = rank
        self._pipe = os.open(config["progress"], os.O_WRONLY)
        turns = config.get("turns")
        self._turns = os.open(f"{turns}.{rank}", os.O_RDWR) if turns else None

    def report(self, what: str, group: int, step: int = 0) -> None:
        """Report an event: `met`, `ready` or `step`."""
        now = time.monotonic()  # all processes of a machine share this clock
        cpu = time.process_time()
        os.write(self._pipe, f"{what} {self._rank} {os.getpid()} {group} {step} {now:.6f} {cpu:.6f}\n".encode())

    def wait(self) -> None:
        """Wait for the turn of this training, if several take turns: one byte per step."""
        if self._turns is not None:
            os.read(self._turns, 1)


def network(params: int, device: Any = "cpu") -> nn.Module:
    """Return a model of about `params` parameters, initialized on its device: 100 million take 0.8 s on a CPU."""
    width = min(_WIDTH, max(1, int(params**0.5)))
    layers = max(1, round(params / (width * (width + 1))))
    return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))


def dataset(params: int) -> TensorDataset:
    """Return a large dataset without much memory.

    The targets are random: gradients that vanish would become denormal numbers, which are slow.
    """
    width = min(_WIDTH, max(1, int(params**0.5)))
    return TensorDataset(torch.ones(1, width).expand(_SAMPLES, -1), torch.randn(_SAMPLES, 1).expand(-1, width))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


loss_of = nn.functional.mse_loss


def through_main(config: dict[str, Any]) -> None:
    """Train with phalanx.main: surviving ranks regroup."""
    import phalanx

    progress: list[ProgressWriter] = []  # one per process, however often `train` is entered

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(config["params"], torch.accelerator.current_accelerator() if config["gpus"] else "cpu")
        return model, adamw(model)

    def train(run: phalanx.Run) -> None:
        if not progress:
            progress.append(ProgressWriter(config, run.rank))
        writer = progress[0]
        writer.report("met", run.group.generation)
        model, opt = run.once(make)
        data = run.loader(dataset(config["params"]), batch_size=_BATCH, shuffle=True)
        run.keep(model=model, opt=opt, data=data)
        wrapped = run.wrap(model, config["strategy"], precision=config["precision"], compile=config["compile"])
        writer.report("ready", run.group.generation)
        for _ in run.epochs(1 << 30):
            batches = iter(run.batches(data))
            while True:
                writer.wait()
                batch = next(batches, None)
                if batch is None:
                    break
                x, y = batch
                loss = loss_of(wrapped(x), y)
                run.backward(loss)
                run.step(opt, loss=loss)
                if config["turns"] and run.device.type == "cuda":
                    torch.cuda.synchronize()  # as in the other loop: the update is part of the time
                writer.report("step", run.group.generation, run.steps)

    phalanx.main(train, device=None if config["gpus"] else "cpu")


def plain(config: dict[str, Any]) -> None:
    """Train with raw PyTorch as a careful user writes it; with "kept" (DDP only), it saves a checkpoint every step."""
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    device = own_device(config["gpus"])
    dist.init_process_group("nccl" if config["gpus"] else "gloo")
    rank, attempt, kept = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), config.get("kept")
    progress = ProgressWriter(config, rank)
    dist.all_reduce(torch.ones(1, device=device))
    progress.report("met", attempt)
    model = network(config["params"], device)
    state = None
    if kept and os.path.exists(kept):
        state = torch.load(kept, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
    wrapped = raw_wrapped(model, config, device)
    opt = adamw(model)  # of the parameters that FSDP has created
    step = 0
    if state is not None:
        opt.load_state_dict(state["opt"])
        step = state["step"]
    cast = torch.autocast(device.type, torch.bfloat16, enabled=config["precision"] == "bf16")
    data = dataset(config["params"])
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=_BATCH, sampler=sampler, drop_last=True)
    progress.report("ready", attempt)
    for x, y in endless(loader, sampler):
        progress.wait()
        with cast:
            output = wrapped(x.to(device))
        loss_of(output, y.to(device)).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if device.type == "cuda":
            torch.cuda.synchronize()  # the step is asynchronous
        if kept and rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, f"{kept}.new")
            os.replace(f"{kept}.new", kept)
        progress.report("step", attempt, step)


def raw_wrapped(model: nn.Module, config: dict[str, Any], device: torch.device) -> nn.Module:
    """Wrap a model as `run.wrap` does, with PyTorch alone: DDP, or FSDP2 of each layer, with two replicas for HSDP."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if config["strategy"] == "ddp":
        if config["compile"]:
            model.compile()
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    ranks = dist.get_world_size()
    replicas = 2 if config["strategy"] == "hsdp" else 1
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    mesh = init_device_mesh(device.type, (replicas, ranks // replicas)[-len(names) :], mesh_dim_names=names)
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
        if config["compile"] and part is not model:
            part.compile()
    return model


def own_device(gpus: list[str]) -> torch.device:
    """Return the device of a rank. torchrun does not set up MIG slices, nor NCCL for ranks that share a GPU."""
    if not gpus:
        return torch.device("cpu")
    if "PHALANX_RUN" not in os.environ and gpus[0].startswith("MIG"):
        local = int(os.environ["LOCAL_RANK"])
        os.environ |= {"CUDA_VISIBLE_DEVICES": gpus[local], "NCCL_HOSTID": f"rank {local}", "NCCL_SOCKET_IFNAME": "=lo"}
        os.environ["LOCAL_RANK"] = "0"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def endless(loader: Iterable[Any], sampler: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    for epoch in range(1 << 30):
        sampler.set_epoch(epoch)
        yield from loader


def torchft(config: dict[str, Any]) -> None:
    """Train as in the DDP example of torchft, with one process per replica group."""
    import torch.distributed as dist
    from torchft import (  # type: ignore[import-not-found,unused-ignore]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )
    from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found,unused-ignore]

    replica = int(os.environ["REPLICA_GROUP_ID"])
    progress = ProgressWriter(config, replica)
    model = network(config["params"])

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
    loader = DataLoader(dataset(config["params"]), batch_size=_BATCH, shuffle=True, drop_last=True)
    progress.report("ready", 0)
    while True:
        for x, y in loader:
            before = manager.current_step()
            opt.zero_grad()
            loss_of(wrapped(x), y).backward()
            opt.step()
            if manager.current_step() > before:  # otherwise the step was discarded
                progress.report("step", manager._quorum_id, manager.current_step())


LOOPS = {"phalanx": through_main, "plain": plain, "torchft": torchft}


def main() -> None:
    """Run the loop that the configuration names."""
    config = json.loads(sys.argv[1])
    LOOPS[config["loop"]](config)


main()
