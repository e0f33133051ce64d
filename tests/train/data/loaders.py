"""The loaders of all ranks in one process, trained step by step and resumed from a state."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from phalanx.train.checkpoint.format.plain import packed, unpacked
from phalanx.train.data.loader import Loader

# torch's DataLoader sets it permanently with its first workers, to notice when one of them is killed.
keeps_handler = pytest.mark.leaves("signal:SIGCHLD", why="torch's DataLoader keeps its handler")
TAILS: dict[str, dict[str, bool]] = {
    "drop": {"drop_last": True},
    "pad": {"pad_last": True},
    "uneven": {"drop_last": False},
}


@dataclass(frozen=True)
class FakeRank:
    rank: int = 0
    world_size: int = 1
    seed: int = 0


def loaders_of(dataset: Any, size: int, **options: Any) -> list[Loader]:
    return [Loader(dataset, FakeRank(rank, size), **options) for rank in range(size)]


def stepped(loaders: list[Loader], steps: int | None = None) -> Iterator[list[int]]:
    """The samples that count in each step, over all ranks. Each step is committed. All ranks must end together."""
    for batches in islice(zip(*loaders, strict=True), steps):
        both = list(zip(loaders, batches, strict=True))
        step = [sample for loader, batch in both for sample in batch[: loader.last_count].tolist()]
        assert {loader.last_total for loader in loaders} == {len(step)}
        for loader in loaders:
            loader.commit()
        yield step


def train(loaders: list[Loader], steps: int | None = None) -> list[list[int]]:
    return list(stepped(loaders, steps))


class ThreadRanks:
    """Ranks that are threads: `total` is the sum over all of them."""

    def __init__(self, size: int) -> None:
        self.numbers = [0] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def total(self, rank: int, number: int) -> int:
        self.numbers[rank] = number
        self.barrier.wait()
        found = sum(self.numbers)
        self.barrier.wait()
        return found


def agreeing_loaders(dataset: Any, size: int, **options: Any) -> list[Loader]:
    """Loaders that agree on every step, so that each needs its own thread."""
    threads = ThreadRanks(size)
    return [
        Loader(dataset, FakeRank(rank, size), total=lambda n, rank=rank: threads.total(rank, n), **options)
        for rank in range(size)
    ]


def train_in_threads(loaders: list[Loader], steps: int | None = None) -> list[list[int]]:
    """`train` with one thread per loader. A rank that takes more steps than the others hangs, and fails the test."""
    done: list[list[list[int]]] = [[] for _ in loaders]

    def train_rank(rank: int, loader: Loader) -> None:
        for batch in loader if steps != 0 else []:
            done[rank].append(batch[: loader.last_count].tolist())
            loader.commit()
            if len(done[rank]) == steps:
                break

    threads = [threading.Thread(target=train_rank, args=rank_and_loader) for rank_and_loader in enumerate(loaders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [[n for part in step for n in part] for step in zip(*done, strict=True)]


def flat(steps: list[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as restored from a checkpoint. A checkpoint has the state of rank 0 only."""
    tensors: dict[str, torch.Tensor] = {}
    back: dict[str, Any] = unpacked(json.loads(json.dumps(packed(state, "data", tensors))), tensors)
    return back


def resumed(old: list[Loader], new: list[Loader]) -> list[Loader]:
    for loader in new:
        loader.load_state_dict(restored(old[0].state_dict()))
    return new


@st.composite
def phases_of_run(draw: st.DrawFn) -> dict[str, Any]:
    """A number of ranks, their batches, how many steps they commit, and how many of those are lost."""
    size = draw(st.integers(1, 5))
    weights = draw(st.none() | st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
    batch = draw(
        st.fixed_dictionaries({"batch_size": st.integers(1, 6)})
        | st.fixed_dictionaries({"global_batch": st.integers(size, 20)})
    )
    return {
        "size": size,
        "options": {**batch, "weights": weights},
        "survived": draw(st.integers(0, 12)),
        "lost": draw(st.integers(0, 3)),
        "ahead": draw(st.integers(0, 2)),  # batches that were taken and never committed
    }
