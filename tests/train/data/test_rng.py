"""Random numbers in data sets and collate functions: the same after a resume, separate from the training's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from phalanx.train.data.loader import Loader
from tests.train.data.datasets import Numbers, StatefulStream, Stream
from tests.train.data.loaders import keeps_handler, loaders_of, restored, resumed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


def noise() -> torch.Tensor:
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


class Noisy(Numbers):
    """Augments with all random number generators."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, noise()


class NoisyStream(Stream):
    """Shuffles without a seed, and augments."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        numbers = list(range(self.length))
        random.shuffle(numbers)
        for number in numbers:
            yield number, noise()


class NoisyShards(NoisyStream):
    def __init__(self, length: int, start: int = 0) -> None:
        super().__init__(length)
        self.start = start

    def shard(self, index: int, count: int) -> NoisyShards:
        if count == 1:
            return self
        return NoisyShards(self.length + index, 100 * index)  # of different lengths

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, drawn in super().__iter__():
            yield self.start + number, drawn


class NoisyStatefulStream(StatefulStream):
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number in super().__iter__():
            yield number, noise()


class StatefulIterator:
    """An iterator with a state."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> tuple[int, torch.Tensor]:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1, noise()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class NoisyStatefulIterator(StatefulStream):
    def __iter__(self) -> StatefulIterator:  # type: ignore[override]
        return StatefulIterator(self.length)


def masked(samples: list[Any]) -> tuple[list[int], torch.Tensor]:
    """Collate, and draw random numbers for it."""
    return [index for index, _ in samples], torch.stack([drawn for _, drawn in samples]) + noise()


def drawn(loader: Loader, steps: int | None = None) -> list[tuple[list[int], list[list[float]]]]:
    found = []
    for indices, sounds in islice(loader, steps):
        found.append((indices, sounds.tolist()))
        loader.commit()
    return found


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make_data", [Noisy, NoisyStream, NoisyShards, NoisyStatefulStream, NoisyStatefulIterator])
def test_a_resumed_run_draws_the_same_random_numbers(make_data: Any, workers: int) -> None:
    def make() -> Loader:
        return loaders_of(make_data(14), 1, batch_size=2, drop_last=False, num_workers=workers, collate_fn=masked)[0]

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    whole = drawn(make())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = make()
    batches = iter(before)
    done = [(indices, sounds.tolist()) for indices, sounds in islice(batches, 3)]
    before.commit()
    after = make()
    after.load_state_dict(restored(before.state_dict()))
    assert (after.state_dict()["workers"] is not None) is isinstance(before.dataset, StatefulStream)
    del batches
    assert done + drawn(after) == whole
    assert len({sound for _, sounds in whole for row in sounds for sound in row}) == 3 * len(
        [index for indices, _ in whole for index in indices]
    )


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(9), Stream(9), NoisyStream(9), NoisyShards(4)])
def test_the_random_state_of_the_training_is_unchanged(dataset: Any, workers: int) -> None:
    """Otherwise a resumed run would draw other numbers than an uninterrupted one."""
    (loader,) = loaders_of(dataset, 1, batch_size=2, num_workers=workers)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(loader)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_without_a_seed_is_the_same_on_all_ranks(workers: int) -> None:
    def indices(loaders: list[Loader], steps: int | None = None) -> list[int]:
        found = []
        for batches in islice(zip(*loaders, strict=True), steps):
            found += [index for batch in batches for index in batch[0]]
            for loader in loaders:
                loader.commit()
        return found

    options: dict[str, Any] = {"drop_last": False, "num_workers": workers, "collate_fn": masked}
    before = loaders_of(NoisyStream(30), 3, batch_size=2, **options)
    done = indices(before, 2)
    after = resumed(before, loaders_of(NoisyStream(30), 2, batch_size=3, **options))
    done += indices(after)
    assert sorted(done) == list(range(30))
    assert done != sorted(done)
    assert indices(after) != done  # the next epoch


@keeps_handler
def test_seeds_of_a_worker_init_function_are_kept() -> None:
    def mine(worker: int) -> None:
        assert get_worker_info().dataset is dataset
        random.seed(worker)

    dataset = Noisy(4)
    (loader,) = loaders_of(dataset, 1, batch_size=2, num_workers=1, worker_init_fn=mine, collate_fn=masked)
    dice = random.Random(0)
    assert drawn(loader)[0][1][0][0] == pytest.approx(dice.random() + [dice.random() for _ in range(2)][1])
