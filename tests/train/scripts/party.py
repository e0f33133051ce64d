"""A minimal group for wrapping a model, from the variables of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Party:
    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu")
        self._calls: list[Callable[[], object]] = []
        torch.set_num_threads(1)
        dist.init_process_group("gloo")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def before_close(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def close(self) -> None:
        for call in reversed(self._calls):
            call()
        dist.destroy_process_group()


def share(total: int, ranks: int, rank: int, *, uneven: bool) -> slice:
    """The samples of a rank: equal parts, or more for the first ones."""
    if not uneven:
        return slice(rank * total // ranks, (rank + 1) * total // ranks)
    weights = list(range(ranks, 0, -1))
    edges = [round(total * sum(weights[:place]) / sum(weights)) for place in range(ranks + 1)]
    return slice(edges[rank], edges[rank + 1])


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(1)
    nn = torch.nn
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
