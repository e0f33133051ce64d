"""Loaders of a data set with an index: epochs, steps, resuming, worker processes."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from phalanx.errors import UsageError
from phalanx.train.data.cursor import LoaderCursor
from phalanx.train.data.indexed import look_up
from phalanx.train.data.order import Order, Position
from tests.kit.proc import descendants
from tests.train.data.datasets import Numbers, StatefulStream, Stream
from tests.train.data.loaders import (
    TAILS,
    flat,
    keeps_handler,
    loaders_of,
    phases_of_run,
    restored,
    resumed,
    stepped,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 2**61) | st.integers(1, 3000), seed=st.integers(0, 99), data=st.data())
def test_a_batched_lookup_equals_single_lookups(length: int, seed: int, data: st.DataObject) -> None:
    order = Order(length, seed=seed)
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    found = look_up(order, torch.tensor(places, dtype=torch.int64))
    assert found.tolist() == [order[place] for place in places]


def test_long_epochs_are_looked_up_in_chunks() -> None:
    loaders = loaders_of(Numbers(12_345), 2, batch_size=700, shuffle=True, drop_last=False)
    assert flat(train(loaders)) == list(Order(12_345))


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(30, 90),
    phases=st.lists(phases_of_run(), max_size=6),
    tail=st.sampled_from(sorted(TAILS)),
    shuffle=st.booleans(),
)
def test_exactly_once(length: int, phases: list[dict[str, Any]], tail: str, shuffle: bool) -> None:
    """Over epochs, failures, ranks, weights and batches: a sample of a committed step counts once in its epoch."""
    epochs = 3
    done: list[list[int]] = [[] for _ in range(epochs)]
    most = [0] * epochs  # samples that may be dropped
    state: dict[str, Any] = {}
    for phase in [*phases, {"size": 2, "options": {"batch_size": 3}, "survived": 10**9, "lost": 0, "ahead": 0}]:
        loaders = loaders_of(Numbers(length), phase["size"], **TAILS[tail], shuffle=shuffle, **phase["options"])
        for loader in loaders if state else []:
            loader.load_state_dict(restored(state))
        committed = [(loaders[0].state_dict(), loaders[0].epoch, list[int]())]
        for epoch in range(loaders[0].epoch, epochs):
            most[epoch] = max(most[epoch], loaders[0].global_batch - 1)
            for loader in loaders:
                loader.set_epoch(epoch)
            for step in stepped(loaders, phase["survived"] + 1 - len(committed)):
                committed.append((loaders[0].state_dict(), epoch, step))
            if len(committed) > phase["survived"]:
                break
        for loader in loaders:
            list(islice(loader, phase["ahead"]))
        committed = committed[: max(1, len(committed) - phase["lost"])]
        state = committed[-1][0]
        for _, epoch, step in committed:
            done[epoch] += step
    for epoch, samples in enumerate(done):
        assert max(Counter(samples).values()) == 1
        assert length - len(samples) <= (most[epoch] if tail == "drop" else 0)
        # And in the order of the epoch, whichever rank took them.
        assert samples == list(islice(Order(length, epoch=epoch, shuffle=shuffle), len(samples)))


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_do_not_change_the_samples(workers: int) -> None:
    restored = {"persistent_workers": True} if workers else {}
    loaders = loaders_of(Numbers(22), 2, batch_size=3, shuffle=True, drop_last=False, num_workers=workers, **restored)
    for epoch in range(2):
        assert flat(train(loaders)) == list(Order(22, epoch=epoch))
    assert flat(train(loaders, 2)) == [Order(22, epoch=2)[place] for place in range(12)]
    assert loaders[0].position == Position(2, 12)  # and not what the workers have fetched


def test_another_number_of_ranks_reads_the_rest_of_the_epoch() -> None:
    before = loaders_of(Numbers(30), 4, batch_size=2, shuffle=True, drop_last=False)
    done = flat(train(before, 2))
    after = resumed(
        before, loaders_of(Numbers(30), 3, batch_size=3, shuffle=True, drop_last=False, weights=[1, 1, 0.5])
    )
    assert after[0].batches == (4, 3, 2)
    done += flat(train(after))
    assert done == list(Order(30))


def test_a_finished_epoch_is_empty_after_a_resume() -> None:
    """The code after the loop of that epoch has not run yet, so a resumed run must reach it."""
    before = loaders_of(Numbers(10), 1, batch_size=4, drop_last=True)
    train(before, 2)
    (after,) = resumed(before, loaders_of(Numbers(10), 2, batch_size=1, drop_last=True)[:1])
    after.set_epoch(0)
    assert (list(after), after.epoch) == ([], 0)
    assert (len(list(after)), after.epoch) == (5, 1)


def test_set_epoch() -> None:
    (loader,) = loaders_of(Numbers(4), 1, batch_size=2)
    train([loader], 1)
    loader.set_epoch(0)  # continues
    assert flat(train([loader])) == [2, 3]
    loader.set_epoch(0)  # a finished epoch is read again
    assert flat(train([loader])) == [0, 1, 2, 3]
    train([loader], 1)
    assert loader.position == Position(1, 2)
    loader.set_epoch(7)
    assert loader.position == Position(7)


def test_an_uneven_step_averages_by_sample() -> None:
    """Each rank's mean loss, scaled and averaged over ranks as DDP does, is the mean over samples."""
    for tail in ("uneven", "pad"):
        loaders = loaders_of(Numbers(13), 3, batch_size=2, **TAILS[tail], weights=[3, 2, 1])
        for batches in zip(*loaders, strict=True):
            means, weighed, counted = [], [], []
            for loader, batch in zip(loaders, batches, strict=True):
                losses = batch.double() ** 2
                means.append(losses.mean() * loader.scale)
                weighed.append((losses * loader.sample_weights).sum() * loader.scale)
                counted += losses[: loader.last_count].tolist()
            true = sum(counted) / len(counted)
            assert float(sum(weighed)) / 3 == pytest.approx(true)
            if tail == "uneven":
                assert float(sum(means)) / 3 == pytest.approx(true)


@pytest.mark.parametrize("workers", [0, 1])
@keeps_handler
def test_a_tensor_data_set_gives_the_batches_of_torch(workers: int) -> None:
    tensors = TensorDataset(torch.arange(40).view(20, 2), torch.arange(20.0), torch.arange(20) > 9)
    (ours,) = loaders_of(tensors, 1, batch_size=6, drop_last=False, num_workers=workers)
    for batch, theirs in zip(ours, DataLoader(tensors, batch_size=6), strict=True):
        assert type(batch) is type(theirs)
        for tensor, expected in zip(batch, theirs, strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


class Doubled(TensorDataset):  # type: ignore[misc]
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class DoubledBatches(TensorDataset):  # type: ignore[misc]
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        assert type(indices) is list
        return [tuple(2 * tensor[index] for tensor in self.tensors) for index in indices]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_tensor_data_sets_are_read_by_sample() -> None:
    for kind in (Doubled, DoubledBatches):
        (ours,) = loaders_of(kind(torch.arange(4)), 1, batch_size=2)
        assert [batch.tolist() for (batch,) in ours] == [[0, 2], [4, 6]]
    (ours,) = loaders_of(TensorDataset(torch.nested.nested_tensor([torch.ones(2)] * 4)), 1, batch_size=2)
    assert [batch.shape for (batch,) in ours] == [(2, 2)] * 2  # it cannot be indexed with a tensor


def test_two_iterations_at_the_same_time_are_refused() -> None:
    (loader,) = loaders_of(Numbers(8), 1, batch_size=2)
    with pytest.raises(UsageError, match="at the same time"):
        list(zip(loader, loader, strict=True))


def test_even_steps_need_no_scale() -> None:
    for loader in loaders_of(Numbers(9), 3, batch_size=1):
        assert loader.scale == 1.0
        assert [loader.scale for _ in loader] == [1.0, 1.0, 1.0]


def test_length_is_that_of_an_epoch() -> None:
    lengths = {tail: len(loaders_of(Numbers(11), 2, batch_size=2, **TAILS[tail])[0]) for tail in TAILS}
    assert lengths == {"drop": 2, "pad": 3, "uneven": 3}


def test_a_custom_collate_function_is_used() -> None:
    (loader,) = loaders_of(Numbers(4), 1, batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]
    (loader,) = loaders_of(Stream(4), 1, batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]


@keeps_handler
@pytest.mark.parametrize("dataset", [Numbers(40), Stream(40), StatefulStream(40)], ids=["index", "stream", "telling"])
def test_worker_processes_end_when_a_loop_is_left(dataset: Any) -> None:
    (loader,) = loaders_of(dataset, 1, batch_size=2, num_workers=2, prefetch_factor=3)
    before = set(descendants(os.getpid()))
    for _ in loader:
        assert len(set(descendants(os.getpid())) - before) == 2
        break
    assert set(descendants(os.getpid())) == before


@keeps_handler
def test_persistent_workers_serve_several_epochs() -> None:
    (loader,) = loaders_of(Numbers(40), 1, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    before, seen = set(descendants(os.getpid())), set()
    for epoch in range(3):
        steps = stepped([loader], 4 if epoch == 1 else None)  # also when a loop is left
        done = next(steps)
        seen |= set(descendants(os.getpid())) - before
        done += flat(list(steps))
        assert done == list(islice(Order(40, epoch=epoch), len(done)))
        loader.set_epoch(epoch + 1)
    assert len(seen) == 2
    del loader, steps
    assert not seen & set(descendants(os.getpid()))


def test_a_cursor_starts_at_the_last_commit() -> None:
    cursor = LoaderCursor()
    assert cursor.start() == (Position(), 0, None)
    cursor.advance(Position(0, 8))
    cursor.commit()
    assert cursor.workers_at_commit
    cursor.advance(Position(0, 16))
    assert not cursor.workers_at_commit  # they are ahead of it
    assert cursor.start() == (Position(0, 8), 1, None)


def test_a_cursor_moves_to_the_next_epoch_after_a_finished_one() -> None:
    cursor = LoaderCursor()
    cursor.go_to(Position(2, 24), 3)
    cursor.resume = {"workers": 1}
    assert cursor.start() == (Position(2, 24), 3, {"workers": 1})
    assert cursor.resume is None
    cursor.finished = True
    assert cursor.start() == (Position(3), 0, None)
