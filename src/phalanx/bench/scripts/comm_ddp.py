"""Measured: steps of DDP whose time is communication, one backend after the other in turns, in the same processes.

phalanx run -g 4 --cpu comm_ddp.py '{"backends": ["shm", "gloo"], "rounds": 10, "steps": 5}'

One line of JSON a backend, by rank 0. "wrap": the group of phalanx.init, with the model of run.wrap.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx

WRAP = "wrap"


@dataclass(frozen=True)
class Case:
    backends: tuple[str, ...] = (WRAP, "shm", "gloo")
    width: int = 1024
    layers: int = 8
    batch: int = 8
    rounds: int = 10
    steps: int = 5


def stepper(run: phalanx.Run, case: Case, backend: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(case.width, case.width) for _ in range(case.layers)))
    if backend == WRAP:
        ddp: Any = run.wrap(model)
    else:
        group = dist.new_group(backend=backend)
        ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(case.batch, case.width)

    def step() -> None:
        ddp(x).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def measured(run: phalanx.Run, case: Case) -> dict[str, list[float]]:
    """Seconds a step, of every round; the slowest rank counts."""
    steps = {backend: stepper(run, case, backend) for backend in case.backends}
    taken: dict[str, list[float]] = {backend: [] for backend in steps}
    for number in range(case.rounds + 1):
        for backend, step in steps.items():
            run.barrier()
            start = time.perf_counter()
            for _ in range(case.steps):
                step()
            seconds = run.max((time.perf_counter() - start) / case.steps)
            if number:  # in the first, DDP lays out its buckets
                taken[backend].append(seconds)
    return taken


def main() -> None:
    case = Case(**(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}))
    with phalanx.init() as run:
        for backend, seconds in measured(run, case).items():
            middle = statistics.median(seconds)
            run.print(
                json.dumps(
                    {
                        "backend": backend,
                        "ranks": run.world_size,
                        "steps_per_second": round(1 / middle, 2),
                        "seconds": [round(one, 6) for one in sorted(seconds)],
                    }
                )
            )


if __name__ == "__main__":
    main()
