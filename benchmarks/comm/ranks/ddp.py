"""Training steps of DDP with each backend, in turn in the same processes, of a model that mostly communicates."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm.ranks.backends import REGIONS
from benchmarks.comm.ranks.exchange import all_gather_json, first_line
from benchmarks.comm.results import DdpSteps
from benchmarks.common.ratios import rotated
from phalanx.train.model import flat

LAYERS, WIDTH, BATCH = 8, 1024, 8

Step = Callable[[], None]


def measure(groups: Mapping[str, Any], rounds: int, seconds: float) -> list[DdpSteps]:
    """Measure a training with each process group. Every rank must call it; all get the same result."""
    made: dict[str, Step] = {}
    failures: dict[str, str] = {}
    for name, group in groups.items():
        try:
            made[name] = _training(group, shared=name == REGIONS)
            made[name]()
        except Exception as error:
            failures[name] = first_line(error)
    bad: list[dict[str, str]] = all_gather_json(failures, dict[str, str])
    failures = {name: why for one in reversed(bad) for name, why in one.items()}
    names = [name for name in made if name not in failures]
    once = torch.tensor([max((_took(made[name], 2) for name in names), default=1.0)], dtype=torch.float64)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    steps = max(2, int(seconds / once.item()))
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.disable()
    for number in range(rounds):
        for name in rotated(names, number) if names else ():
            dist.barrier()
            times[name].append(_took(made[name], steps))
    gc.enable()
    gathered: list[dict[str, list[float]]] = all_gather_json(times, dict[str, list[float]])
    ranks = dist.get_world_size()
    return [
        DdpSteps(ranks, name, failure=failures[name])
        if name in failures
        else DdpSteps(ranks, name, tuple(map(max, zip(*(one[name] for one in gathered), strict=True))))
        for name in groups
    ]


def _training(group: Any, *, shared: bool) -> Step:
    """Return a training step; with `shared`, the buckets are in memory that all ranks have mapped, as run.wrap does."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(plain, process_group=group, gradient_as_bucket_view=True)
    if shared:
        flat.share(model)
    parameters = list(plain.parameters())
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            # Without an optimizer, whose import takes longer than this measurement.
            torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-0.01)
        model.zero_grad(set_to_none=False)

    return step


def _took(step: Step, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps
