"""Time the steps of one training loop, written for each contender, in turn in the same processes.

python step.py '{"contenders": [...], "case": {...}, "rounds": 30, "steps": 20, ..., "file": "result.json"}'
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phalanx

Loop = Callable[[int], None]
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
_EPOCH = 64  # steps


class TrainingSetup:
    """The model and data of all contenders."""

    def __init__(self, config: dict[str, Any], run: phalanx.Run) -> None:
        self.run, self.device = run, run.device
        self.width, self.layers, self.batch = config["width"], config["layers"], config["batch"]
        self.accumulate, self.clip, self.reads = (config["case"][name] for name in ("accumulate", "clip", "reads"))
        torch.manual_seed(dist.get_rank())
        self.one = (self._samples(self.batch).to(self.device), self._samples(self.batch).to(self.device))
        self.loss = nn.functional.mse_loss

    def _samples(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.width)

    def dataset(self) -> TensorDataset:
        """Return random samples for _EPOCH steps of all ranks."""
        count = self.batch * _EPOCH * dist.get_world_size()
        return TensorDataset(self._samples(count), self._samples(count))

    def batches(self, read: Callable[[TensorDataset], Callable[[], Iterable[Any]]]) -> Batches:
        """Return endless batches: those of the contender, epoch after epoch, or always the same batch."""
        return endless(read(self.dataset())) if self.reads else repeat(self.one)

    def loader(self, dataset: TensorDataset, **how: Any) -> DataLoader[Any]:
        """Return a DataLoader over a dataset."""
        return DataLoader(dataset, batch_size=self.batch, drop_last=True, pin_memory=self.device.type == "cuda", **how)

    def model(self) -> nn.Module:
        """Return a new model with the same weights on all ranks."""
        torch.manual_seed(0)
        blocks = [part for _ in range(self.layers) for part in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*blocks).to(self.device)

    def release_at_exit(self, model: Any) -> None:
        """Drop the DDP wrapper's references before the process group is destroyed."""
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError("it did not use the existing process group")

        def drop() -> None:
            model.reducer = model.logger = None

        self.run.group.before_close(drop)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW for a model."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


def endless(read: Callable[[], Iterable[Any]]) -> Batches:
    """Yield the batches of one epoch after another."""
    while True:
        yield from read()


def raw(setup: TrainingSetup) -> Loop:
    """Return the loop that a careful user writes without a library."""
    device, accumulate, clip = setup.device, setup.accumulate, setup.clip
    own = None if device.type == "cpu" else [device.index]
    model = DistributedDataParallel(setup.model(), device_ids=own, gradient_as_bucket_view=True)
    opt = setup.optimizer(model)
    setup.release_at_exit(model)

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        sampler = DistributedSampler(dataset)
        loader = setup.loader(dataset, sampler=sampler)
        epochs = iter(range(1 << 60))

        def epoch() -> Iterator[Any]:
            sampler.set_epoch(next(epochs))
            for x, y in loader:
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

        return epoch

    batches = setup.batches(read)

    def plain(steps: int) -> None:
        for x, y in islice(batches, steps):
            loss = setup.loss(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad(set_to_none=True)

    def accumulated(steps: int) -> None:
        for number, (x, y) in enumerate(islice(batches, steps), 1):
            last = number % accumulate == 0
            with nullcontext() if last else model.no_sync():
                loss = setup.loss(model(x), y) / accumulate
                loss.backward()
            if last:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad(set_to_none=True)

    return plain if accumulate == 1 else accumulated


def through_run(setup: TrainingSetup) -> Loop:
    """Return the loop with phalanx.Run."""
    run = setup.run
    model = run.wrap(setup.model(), accumulate=setup.accumulate)
    opt = setup.optimizer(model)
    accumulate, clip = setup.accumulate, setup.clip

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        data = run.loader(dataset, batch_size=setup.batch, shuffle=True)
        return lambda: run.batches(data)

    batches = setup.batches(read)

    def loop(steps: int) -> None:
        for x, y in islice(batches, steps):
            loss = setup.loss(model(x), y)
            run.backward(loss)
            run.step(opt, accumulate=accumulate, clip=clip, loss=loss)

    return loop


def accelerate(setup: TrainingSetup) -> Loop:
    """Return the loop with Hugging Face Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs  # type: ignore[import-untyped,unused-ignore]

    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=setup.device.type == "cpu", gradient_accumulation_steps=setup.accumulate, kwargs_handlers=[views]
    )
    plain = setup.model()
    model, opt = accelerator.prepare(plain, setup.optimizer(plain))
    setup.release_at_exit(model)
    clip = setup.clip

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        loader = accelerator.prepare(setup.loader(dataset, shuffle=True))
        return lambda: loader

    batches = setup.batches(read)

    def loop(steps: int) -> None:
        for x, y in islice(batches, steps):
            with accelerator.accumulate(model):
                loss = setup.loss(model(x), y)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad()

    return loop


def fabric(setup: TrainingSetup) -> Loop:
    """Return the loop with Lightning Fabric."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found,unused-ignore]
    from lightning.fabric.strategies import DDPStrategy  # type: ignore[attr-defined,import-not-found,unused-ignore]

    engine = Fabric(
        accelerator=setup.device.type,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(gradient_as_bucket_view=True),
    )
    engine.launch()
    plain = setup.model()
    model, opt = engine.setup(plain, setup.optimizer(plain))
    setup.release_at_exit(model._forward_module)
    accumulate, clip = setup.accumulate, setup.clip

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        loader = engine.setup_dataloaders(setup.loader(dataset, shuffle=True))
        return lambda: loader

    batches = setup.batches(read)

    def loop(steps: int) -> None:
        for number, (x, y) in enumerate(islice(batches, steps), 1):
            last = number % accumulate == 0
            with engine.no_backward_sync(model, enabled=not last):
                loss = setup.loss(model(x), y) / accumulate
                engine.backward(loss)
            if last:
                if clip:
                    engine.clip_gradients(model, opt, max_norm=clip)
                opt.step()
                opt.zero_grad()

    return loop


# The second loop of raw PyTorch shows the noise.
LOOPS = {"raw": raw, "again": raw, "phalanx": through_run, "accelerate": accelerate, "fabric": fabric}


def timed(loop: Loop, steps: int, device: torch.device) -> float:
    """Return the seconds per step of `steps` steps."""
    dist.barrier()
    begin = time.perf_counter()
    loop(steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / steps


def main() -> None:
    """Run all rounds; rank 0 writes the times."""
    config = json.loads(sys.argv[1])
    run = phalanx.Run(phalanx.init(device="cpu" if config["device"] == "cpu" else None))
    device = run.device
    setup = TrainingSetup(config, run)
    loops: dict[str, Loop] = {}
    failures: dict[str, str] = {}
    for name in config["contenders"]:
        try:
            loops[name] = LOOPS[name](setup)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    for loop in loops.values():
        timed(loop, config["steps"], device)
    # A garbage collection would be counted as time of the contender that it interrupts.
    gc.collect()
    gc.freeze()
    gc.disable()
    samples: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(config["rounds"]):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            samples[name].append(timed(loops[name], config["steps"], device))
        gc.collect()
    if dist.get_rank() == 0:
        with open(config["file"], "w") as file:
            json.dump({"samples": samples, "failures": failures}, file)
    loops.clear()
    gc.unfreeze()
    run.group.close()


main()
