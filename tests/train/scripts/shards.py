"""Two ranks read data sets of unknown length; what each read, and in how many steps, is written to a file."""

import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from phalanx.train.data.loader import Loader


@dataclass
class Here:
    rank: int
    world_size: int
    seed: int = 0


class Parts(IterableDataset):
    """Part i of n has `lengths[i]` numbers: 1000 * i, 1000 * i + 1, …"""

    def __init__(self, lengths: list[int], index: int | None = None) -> None:
        self.lengths, self.index = lengths, index

    def shard(self, index: int, count: int) -> "Parts":
        if count == 1:
            return Parts(self.lengths, next(part for part, length in enumerate(self.lengths) if length))
        assert count == len(self.lengths)
        return Parts(self.lengths, index)

    def __iter__(self):
        yield from range(1000 * self.index, 1000 * self.index + self.lengths[self.index])


class Plain(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        yield from range(self.length)


dist.init_process_group("gloo")
here = Here(dist.get_rank(), dist.get_world_size())
results = []


def go(dataset, tail: str, workers: int, resume_after: int | None = None) -> None:
    """Every step has a collective, so ranks with different numbers of steps hang, or fail."""
    options = {"drop_last": tail == "drop", "pad_last": tail == "pad"}
    loader = Loader(dataset, here, batch_size=2, num_workers=workers, **options)
    steps, counted, scales = 0, [], []
    lives = [resume_after, None] if resume_after else [None]
    for life in lives:
        for batch in loader:
            dist.all_reduce(torch.ones(1))
            counted += batch[: loader.last_count].tolist()
            scales.append(loader.scale)
            assert torch.isclose(loader.sample_weights.sum(), torch.tensor(float(loader.last_count > 0)))
            assert len(batch) == len(loader.sample_weights)
            loader.commit()
            steps += 1
            if steps == life:
                break
        if life:
            state = json.loads(json.dumps(loader.state_dict()))
            loader = Loader(dataset, here, batch_size=2, num_workers=workers, **options)
            loader.load_state_dict(state)
    results.append({"steps": steps, "counted": counted, "scales": scales})


go(Parts([5, 2]), "uneven", 0)
go(Parts([5, 2]), "pad", 0)
go(Parts([5, 2]), "drop", 0)
go(Parts([3, 0]), "uneven", 0)
go(Parts([5, 4, 0, 3]), "uneven", 2)
go(Parts([7, 5]), "uneven", 0, resume_after=2)
go(Plain(7), "uneven", 0)

with open(f"{sys.argv[1]}/{here.rank}.json", "w") as file:
    json.dump(results, file)
dist.destroy_process_group()
