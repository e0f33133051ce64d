"""Loaders of iterable data sets, with and without their own state."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.data.loader import Loader
from tests.train.data.datasets import StatefulStream, Stream
from tests.train.data.loaders import (
    TAILS,
    FakeRank,
    flat,
    keeps_handler,
    loaders_of,
    phases_of_run,
    restored,
    resumed,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


@settings(max_examples=50, deadline=None)
@given(length=st.integers(0, 60), phases=st.lists(phases_of_run(), max_size=4), tail=st.sampled_from(sorted(TAILS)))
def test_a_stream_is_dealt_as_if_it_had_an_index(length: int, phases: list[dict[str, Any]], tail: str) -> None:
    loaders: list[Loader] = []
    done: list[int] = []
    most = 0
    for phase in [*phases, {"size": 2, "options": {"batch_size": 3}, "survived": None, "ahead": 0}]:
        new = loaders_of(Stream(length), phase["size"], **TAILS[tail], **phase["options"])
        loaders = resumed(loaders, new) if loaders else new
        done += flat(train(loaders, phase["survived"]))
        most = max(most, loaders[0].global_batch - 1)
        if loaders[0]._cursor.finished:
            break
        list(islice(loaders[0], phase["ahead"]))  # and not committed
    assert done == list(range(len(done)))
    assert length - len(done) <= (most if tail == "drop" else 0)


@keeps_handler
def test_worker_processes_do_not_change_a_stream() -> None:
    loaders = loaders_of(Stream(23), 2, batch_size=2, drop_last=False, num_workers=2)
    assert flat(train(loaders, 3)) == list(range(12))
    assert [loader.dataset.epoch for loader in loaders] == [0, 0]
    loaders = resumed(loaders, loaders_of(Stream(23), 1, batch_size=3, pad_last=True, num_workers=2))
    assert flat(train(loaders)) == list(range(12, 23))
    assert flat(train(loaders, 1)) == [0, 1, 2]
    assert loaders[0].dataset.epoch == 1


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_stream_resumes_from_its_state(workers: int) -> None:
    (before,) = loaders_of(StatefulStream(20), 1, batch_size=3, drop_last=False, num_workers=workers)
    batches = iter(before)
    done = [n for _ in range(3) for n in next(batches).tolist()]
    before.commit()
    state = json.loads(json.dumps(before.state_dict()))
    del batches
    assert state["workers"] is not None
    (after,) = loaders_of(StatefulStream(20), 1, batch_size=3, drop_last=False, num_workers=workers)
    after.load_state_dict(state)
    assert after.state_dict() == state
    assert done + flat(train([after])) == list(range(20))
    if not workers:
        assert after.dataset.began == 9  # nothing was read again


def test_a_stateful_stream_resumes_with_another_number_of_ranks() -> None:
    before = loaders_of(StatefulStream(20), 1, batch_size=3, drop_last=False)
    done = flat(train(before, 2))
    after = [Loader(StatefulStream(20), FakeRank(rank, 2), batch_size=2, drop_last=False) for rank in range(2)]
    done += flat(train(resumed(before, after)))
    assert done == list(range(20))


def test_a_stateful_stream_can_be_left_and_read_again() -> None:
    loaders = loaders_of(StatefulStream(9), 1, batch_size=2, drop_last=False)
    done = flat(train(loaders, 2))
    done += flat(train(loaders, 1))
    next(iter(loaders[0]))  # not committed
    done += flat(train(loaders))
    assert done == list(range(9))
    assert flat(train(loaders)) == list(range(9))


def test_without_torchdata_a_stateful_stream_is_read_again_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)  # as if it were not installed
    with pytest.warns(UserWarning, match=r"pip install phalanx\[data\]"):
        before = loaders_of(StatefulStream(9), 1, batch_size=3)
    done = flat(train(before, 1))
    with pytest.warns(UserWarning, match="read again"):
        after = resumed(before, loaders_of(StatefulStream(9), 1, batch_size=3))
    assert done + flat(train(after)) == list(range(9))


class StreamWithEpoch(StatefulStream):
    """Has the epoch in its state."""

    def __iter__(self) -> Iterator[int]:
        yield from (100 * self.epoch + number for number in super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def test_set_epoch_reaches_a_stream_that_was_left() -> None:
    (loader,) = loaders_of(StreamWithEpoch(6), 1, batch_size=2)
    assert flat(train([loader], 2)) == [0, 1, 2, 3]
    loader.set_epoch(1)
    assert flat(train([loader], 2)) == [100, 101, 102, 103]


class StreamWithTupleState(StatefulStream):
    """Has a state that JSON alone would change."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,), 7: torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.at,) = state["at"]
        assert isinstance(state["at"], tuple)
        assert state[7].tolist() == [self.at]


@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_of_a_stream_resume_from_the_state_of_rank_0(size: int) -> None:
    def make() -> list[Loader]:
        return [
            Loader(StreamWithTupleState(20), FakeRank(rank, size), batch_size=2, drop_last=False)
            for rank in range(size)
        ]

    before = make()
    batches = zip(*before, strict=True)
    done = [[n for batch in next(batches) for n in batch.tolist()] for _ in range(3)]
    for loader in before:
        loader.commit()
    state = restored(before[0].state_dict())
    after = make()
    for loader in after:
        loader.load_state_dict(state)
    assert flat(done + train(after)) == list(range(20))
    assert [loader.dataset.began for loader in after] == [6 * size] * size  # nothing was read again
