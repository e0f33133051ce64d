"""Options of a loader: defaults, rejected options, and loaders that evaluate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx.errors import UsageError
from phalanx.train.data.loader import Loader
from tests.train.data.datasets import Numbers, Shards, Stream
from tests.train.data.loaders import FakeRank, keeps_handler, loaders_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


def test_a_state_of_other_data_is_refused() -> None:
    state = loaders_of(Numbers(10), 1, batch_size=2)[0].state_dict()
    assert json.loads(json.dumps(state)) == state
    for other, seen in [
        (loaders_of(Numbers(11), 1, batch_size=2), "length: 10 then, 11 now"),
        (loaders_of(Numbers(10), 1, batch_size=2, seed=5), "seed: 0 then, 5 now"),
        (loaders_of(Numbers(10), 1, batch_size=2, shuffle=True), "shuffle: False then, True now"),
        (loaders_of(Stream(10), 1, batch_size=2), "kind: indexed then, stream now"),
    ]:
        with pytest.raises(UsageError) as caught:
            other[0].load_state_dict(state)
        assert seen in str(caught.value)
        assert caught.value.fix
    with pytest.raises(UsageError, match="not the state of a loader"):
        other[0].load_state_dict({"epoch": 3})


@pytest.mark.parametrize(
    ("dataset", "options", "seen"),
    [
        (Numbers(10), {}, "neither batch_size nor global_batch"),
        (Numbers(10), {"batch_size": 2, "global_batch": 4}, "batch_size=2, global_batch=4"),
        (Numbers(10), {"batch_size": -2}, "batch_size=-2"),
        (Numbers(10), {"batch_size": 0}, "batch_size=0 was given"),
        (Numbers(10), {"global_batch": 2.5}, "global_batch=2.5 was given"),
        (Numbers(10), {"batch_size": True}, "batch_size=True was given"),
        (
            Numbers(10),
            {"batch_size": 11, "shuffle": True},
            "an epoch has no step: 10 samples, 11 per step, and the last",
        ),
        (Numbers(0), {"batch_size": 1, "pad_last": True}, "an epoch has no step"),
        (Numbers(10), {"batch_size": 2, "sampler": range(3)}, "sampler: this loader chooses"),
        (Numbers(10), {"batch_size": 2, "shuffle": "yes"}, "shuffle='yes' is a str, expected True or False"),
        (Numbers(10), {"batch_size": 2, "num_workers": "4"}, "num_workers='4': expected a whole number"),
        (Numbers(10), {"batch_size": 2, "drop_last": True, "pad_last": True}, "not both"),
        (Numbers(10), {"batch_size": 2, "train": False, "shuffle": True}, "train=False with shuffle=True"),
        (Numbers(10), {"batch_size": 2, "train": False, "drop_last": True}, "train=False with drop_last=True"),
        (Stream(10), {"batch_size": 2, "shuffle": True}, "cannot be shuffled"),
        (Stream(10), {"batch_size": 2, "persistent_workers": True}, "persistent_workers"),
        (iter([1, 2]), {"batch_size": 2}, "only once"),
        (7, {"batch_size": 2}, "int is not a data set"),
    ],
)
def test_invalid_options_are_refused(dataset: Any, options: dict[str, Any], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        Loader(dataset, FakeRank(), **options)
    assert seen in str(caught.value)


@pytest.mark.parametrize(
    ("options", "tail"),
    [
        ({}, "uneven"),
        ({"shuffle": True}, "drop"),
        ({"train": True}, "drop"),
        ({"train": True, "drop_last": False}, "uneven"),
        ({"shuffle": True, "drop_last": False}, "uneven"),
        ({"shuffle": True, "pad_last": True}, "pad"),
        ({"train": False}, "every"),
        ({"train": False, "drop_last": False}, "every"),
    ],
)
def test_the_default_for_the_last_samples(options: dict[str, Any], tail: str) -> None:
    assert Loader(Numbers(10), FakeRank(), batch_size=3, **options).tail == tail


def evaluated(loaders: list[Loader]) -> list[list[list[int]]]:
    """The batches of each rank, one rank after the other: no rank waits for another."""
    return [[batch.tolist() for batch in loader] for loader in loaders]


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Numbers, Stream])
def test_an_evaluation_reads_every_sample_once(make: Callable[[int], Any], workers: int) -> None:
    for length, size, batch in ((301, 3, 50), (10, 3, 3), (7, 2, 1), (2, 3, 4), (9, 1, 4)):
        read = evaluated(loaders_of(make(length), size, batch_size=batch, train=False, num_workers=workers))
        assert sorted(sample for rank in read for part in rank for sample in part) == list(range(length))
        assert len({len(rank) for rank in read}) == 1 or length < size
        if workers == 0:
            again = evaluated(loaders_of(make(length), size, batch_size=batch, train=False))
            assert again == read


def test_an_evaluation_of_shards_does_not_wait_for_other_ranks() -> None:
    def never(_: int) -> int:
        raise AssertionError("an evaluation must not wait for other ranks")

    read = [
        [batch.tolist() for batch in Loader(Shards(31), FakeRank(rank, 3), batch_size=4, train=False, total=never)]
        for rank in range(3)
    ]
    assert sorted(sample for rank in read for part in rank for sample in part) == list(range(31))


def test_a_loop_without_gradients_is_an_evaluation_by_default() -> None:
    loaders = loaders_of(Numbers(10), 3, batch_size=3)
    assert [sum(map(len, rank)) for rank in evaluated(loaders)] == [4, 4, 4]  # with one each that does not count
    with torch.no_grad():
        assert sum(len(part) for rank in evaluated(loaders) for part in rank) == 10
    assert [sum(map(len, rank)) for rank in evaluated(loaders)] == [4, 4, 4]
    with torch.no_grad():
        assert (
            sum(
                len(part) for rank in evaluated(loaders_of(Numbers(10), 3, batch_size=3, shuffle=True)) for part in rank
            )
            == 9
        )
