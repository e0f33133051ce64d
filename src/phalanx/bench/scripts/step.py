"""Measured: steps of one training loop, written with each contender, in turns in the same processes.

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


class Problem:
    """The same model and data for everybody."""

    def __init__(self, told: dict[str, Any], run: phalanx.Run) -> None:
        self.run, self.device = run, run.device
        self.width, self.layers, self.batch = told["width"], told["layers"], told["batch"]
        self.accumulate, self.clip, self.reads = (told["case"][name] for name in ("accumulate", "clip", "reads"))
        torch.manual_seed(dist.get_rank())
        self.one = (self._samples(self.batch).to(self.device), self._samples(self.batch).to(self.device))
        self.loss = nn.functional.mse_loss

    def _samples(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.width)

    def dataset(self) -> TensorDataset:
        count = self.batch * _EPOCH * dist.get_world_size()
        return TensorDataset(self._samples(count), self._samples(count))

    def batches(self, read: Callable[[TensorDataset], Callable[[], Iterable[Any]]]) -> Batches:
        """For ever: what the contender reads, an epoch after the other, or the same batch again and again."""
        return endless(read(self.dataset())) if self.reads else repeat(self.one)

    def loader(self, dataset: TensorDataset, **how: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=self.batch, drop_last=True, pin_memory=self.device.type == "cuda", **how)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = [part for _ in range(self.layers) for part in (nn.Linear(self.width, self.width), nn.ReLU())]
        return nn.Sequential(*blocks).to(self.device)

    def let_go(self, model: Any) -> None:
        """At the end: no wrapper may be the last to hold the group."""
        if not isinstance(model, DistributedDataParallel):
            raise RuntimeError("it did not take the process group that is there")

        def drop() -> None:
            model.reducer = model.logger = None

        self.run.before_close(drop)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)


def endless(read: Callable[[], Iterable[Any]]) -> Batches:
    while True:
        yield from read()


def raw(problem: Problem) -> Loop:
    """What a careful user writes without a library."""
    device, accumulate, clip = problem.device, problem.accumulate, problem.clip
    own = None if device.type == "cpu" else [device.index]
    model = DistributedDataParallel(problem.model(), device_ids=own, gradient_as_bucket_view=True)
    opt = problem.optimizer(model)
    problem.let_go(model)

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        sampler = DistributedSampler(dataset)
        loader = problem.loader(dataset, sampler=sampler)
        epochs = iter(range(1 << 60))

        def epoch() -> Iterator[Any]:
            sampler.set_epoch(next(epochs))
            for x, y in loader:
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

        return epoch

    batches = problem.batches(read)

    def plain(steps: int) -> None:
        for x, y in islice(batches, steps):
            loss = problem.loss(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad(set_to_none=True)

    def accumulated(steps: int) -> None:
        for number, (x, y) in enumerate(islice(batches, steps), 1):
            last = number % accumulate == 0
            with nullcontext() if last else model.no_sync():
                loss = problem.loss(model(x), y) / accumulate
                loss.backward()
            if last:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad(set_to_none=True)

    return plain if accumulate == 1 else accumulated


def through_run(problem: Problem) -> Loop:
    run = problem.run
    model = run.wrap(problem.model(), accumulate=problem.accumulate)
    opt = problem.optimizer(model)
    accumulate, clip = problem.accumulate, problem.clip

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        data = run.loader(dataset, batch_size=problem.batch, shuffle=True)
        return lambda: run.batches(data)

    batches = problem.batches(read)

    def loop(steps: int) -> None:
        for x, y in islice(batches, steps):
            loss = problem.loss(model(x), y)
            run.backward(loss)
            run.step(opt, accumulate=accumulate, clip=clip, loss=loss)

    return loop


def accelerate(problem: Problem) -> Loop:
    from accelerate import Accelerator, DistributedDataParallelKwargs  # type: ignore[import-untyped,unused-ignore]

    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=problem.device.type == "cpu", gradient_accumulation_steps=problem.accumulate, kwargs_handlers=[views]
    )
    plain = problem.model()
    model, opt = accelerator.prepare(plain, problem.optimizer(plain))
    problem.let_go(model)
    clip = problem.clip

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        loader = accelerator.prepare(problem.loader(dataset, shuffle=True))
        return lambda: loader

    batches = problem.batches(read)

    def loop(steps: int) -> None:
        for x, y in islice(batches, steps):
            with accelerator.accumulate(model):
                loss = problem.loss(model(x), y)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad()

    return loop


def fabric(problem: Problem) -> Loop:
    from lightning.fabric import Fabric  # type: ignore[import-not-found,unused-ignore]
    from lightning.fabric.strategies import DDPStrategy  # type: ignore[attr-defined,import-not-found,unused-ignore]

    engine = Fabric(
        accelerator=problem.device.type,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(gradient_as_bucket_view=True),
    )
    engine.launch()
    plain = problem.model()
    model, opt = engine.setup(plain, problem.optimizer(plain))
    problem.let_go(model._forward_module)
    accumulate, clip = problem.accumulate, problem.clip

    def read(dataset: TensorDataset) -> Callable[[], Iterable[Any]]:
        loader = engine.setup_dataloaders(problem.loader(dataset, shuffle=True))
        return lambda: loader

    batches = problem.batches(read)

    def loop(steps: int) -> None:
        for number, (x, y) in enumerate(islice(batches, steps), 1):
            last = number % accumulate == 0
            with engine.no_backward_sync(model, enabled=not last):
                loss = problem.loss(model(x), y) / accumulate
                engine.backward(loss)
            if last:
                if clip:
                    engine.clip_gradients(model, opt, max_norm=clip)
                opt.step()
                opt.zero_grad()

    return loop


# The second loop of raw PyTorch shows how much of a difference is none.
MADE = {"raw": raw, "again": raw, "phalanx": through_run, "accelerate": accelerate, "fabric": fabric}


def timed(loop: Loop, steps: int, device: torch.device) -> float:
    dist.barrier()
    begin = time.perf_counter()
    loop(steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / steps


def main() -> None:
    told = json.loads(sys.argv[1])
    run = phalanx.init(device="cpu" if told["device"] == "cpu" else None)
    device = run.device
    problem = Problem(told, run)
    loops: dict[str, Loop] = {}
    failures: dict[str, str] = {}
    for name in told["contenders"]:
        try:
            loops[name] = MADE[name](problem)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    for loop in loops.values():
        timed(loop, told["steps"], device)
    # A collection that strikes one contender would be counted as its own.
    gc.collect()
    gc.freeze()
    gc.disable()
    samples: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(told["rounds"]):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            samples[name].append(timed(loops[name], told["steps"], device))
        gc.collect()
    if dist.get_rank() == 0:
        with open(told["file"], "w") as file:
            json.dump({"samples": samples, "failures": failures}, file)
    loops.clear()
    gc.unfreeze()
    run.close()


main()
