"""Train with and without the probe, in turn in the same process, and write the time of a step.

probe.py '{"rounds": …, "seconds": …, "width": …, "file": …}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

CONFIG = json.loads(sys.argv[1])
PROBE: Any = sys.modules["_phalanx_forkserver.probe.probe"].current


def main() -> None:
    """Train all rounds; rank 0 writes the times."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = CONFIG["width"]
    model: nn.Module = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
    )
    model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, width)

    def steps(count: int) -> tuple[float, float]:
        """Return the time of a step: seconds, and CPU seconds."""
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / count, (time.process_time() - cpu) / count

    steps(50)
    usual = torch.tensor([steps(200)[0]])
    dist.all_reduce(usual, dist.ReduceOp.MAX)
    count = max(10, int(CONFIG["seconds"] / float(usual)))  # the same on all ranks
    hooks = dict(optimizers._global_optimizer_post_hooks)
    pairs, computing, used = [], [], []
    for number in range(CONFIG["rounds"]):
        pair: dict[str, tuple[float, float]] = {}
        for how in ("with", "without") if number % 2 else ("without", "with"):
            if how == "without":
                PROBE.stop()
                optimizers._global_optimizer_post_hooks.clear()
            else:
                optimizers._global_optimizer_post_hooks.update(hooks)
                PROBE.start()
            dist.barrier()
            before = cpu_seconds() if how == "with" else 0.0
            pair[how] = steps(count)
            if how == "with":
                used.append((cpu_seconds() - before) / (pair[how][0] * count))
            dist.barrier()
        pairs.append((pair["with"][0], pair["without"][0]))
        computing.append((pair["with"][1], pair["without"][1]))
    PROBE.start()
    if dist.get_rank() == 0:
        with open(CONFIG["file"], "w") as file:
            json.dump({"pairs": pairs, "computing": computing, "used": used}, file)
    dist.destroy_process_group()


def cpu_seconds() -> float:
    """Return the CPU seconds of the probe so far."""
    while not PROBE.thread:
        time.sleep(0.001)
    try:
        with open(f"/proc/self/task/{PROBE.thread}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except FileNotFoundError:  # it has just been restarted
        return 0.0


if __name__ == "__main__":
    main()
