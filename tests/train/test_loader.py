"""What ranks get from their loaders: real DataLoaders with and without workers, restarts, streams, parts."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from phalanx.errors import UsageError
from phalanx.train.checkpoint.format.plain import packed, unpacked
from phalanx.train.data.cursor import LoaderCursor
from phalanx.train.data.indexed import look_up
from phalanx.train.data.loader import Loader
from phalanx.train.data.order import Order, Position
from tests.kit.cli import phalanx
from tests.kit.proc import descendants

# torch's DataLoader sets it with its first workers, once and for all, to notice when one of them is killed.
keeps_handler = pytest.mark.leaves("signal:SIGCHLD", why="torch's DataLoader keeps its handler")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
TAILS: dict[str, dict[str, bool]] = {
    "drop": {"drop_last": True},
    "pad": {"pad_last": True},
    "uneven": {"drop_last": False},
}


@dataclass(frozen=True)
class Here:
    rank: int = 0
    world_size: int = 1
    seed: int = 0


class Numbers:
    """A data set with an index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):  # type: ignore[misc]
    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()  # as torch's manual deals
        yield from range(worker.id, self.length, worker.num_workers) if worker else range(self.length)


class Telling(Stream):
    """Can say where it is, and starts there: nothing is read twice."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0
        self.began = 0

    def __iter__(self) -> Iterator[int]:
        self.began = self.at
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def crew(dataset: Any, size: int, **options: Any) -> list[Loader]:
    return [Loader(dataset, Here(rank, size), **options) for rank in range(size)]


def stepped(loaders: list[Loader], steps: int | None = None) -> Iterator[list[int]]:
    """What counted in each step of all ranks together, which is committed. All ranks must end together."""
    for batches in islice(zip(*loaders, strict=True), steps):
        both = list(zip(loaders, batches, strict=True))
        step = [sample for loader, batch in both for sample in batch[: loader.last_count].tolist()]
        assert {loader.last_total for loader in loaders} == {len(step)}
        for loader in loaders:
            loader.commit()
        yield step


def train(loaders: list[Loader], steps: int | None = None) -> list[list[int]]:
    return list(stepped(loaders, steps))


class Chairs:
    """Ranks that are threads: `total` adds up over all of them."""

    def __init__(self, size: int) -> None:
        self.numbers = [0] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def total(self, rank: int, number: int) -> int:
        self.numbers[rank] = number
        self.barrier.wait()
        found = sum(self.numbers)
        self.barrier.wait()
        return found


def council(dataset: Any, size: int, **options: Any) -> list[Loader]:
    """Loaders that have to agree on every step, so that each needs a thread of its own."""
    chairs = Chairs(size)
    return [
        Loader(dataset, Here(rank, size), total=lambda n, rank=rank: chairs.total(rank, n), **options)
        for rank in range(size)
    ]


def meet(loaders: list[Loader], steps: int | None = None) -> list[list[int]]:
    """`train` for a council. Two steps of a rank that the others do not take would be a hang, and a failure."""
    done: list[list[list[int]]] = [[] for _ in loaders]

    def sit(rank: int, loader: Loader) -> None:
        for batch in loader if steps != 0 else []:
            done[rank].append(batch[: loader.last_count].tolist())
            loader.commit()
            if len(done[rank]) == steps:
                break

    threads = [threading.Thread(target=sit, args=chair) for chair in enumerate(loaders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [[n for part in step for n in part] for step in zip(*done, strict=True)]


def flat(steps: list[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a checkpoint, which has the state of rank 0 alone."""
    tensors: dict[str, torch.Tensor] = {}
    back: dict[str, Any] = unpacked(json.loads(json.dumps(packed(state, "data", tensors))), tensors)
    return back


def handed_on(old: list[Loader], new: list[Loader]) -> list[Loader]:
    for loader in new:
        loader.load_state_dict(kept(old[0].state_dict()))
    return new


# With an index


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 2**61) | st.integers(1, 3000), seed=st.integers(0, 99), data=st.data())
def test_many_places_are_looked_up_as_each_is(length: int, seed: int, data: st.DataObject) -> None:
    order = Order(length, seed=seed)
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    found = look_up(order, torch.tensor(places, dtype=torch.int64))
    assert found.tolist() == [order[place] for place in places]


def test_many_steps_are_looked_up_in_several_goes() -> None:
    loaders = crew(Numbers(12_345), 2, batch_size=700, shuffle=True, drop_last=False)
    assert flat(train(loaders)) == list(Order(12_345))


@st.composite
def lives(draw: st.DrawFn) -> dict[str, Any]:
    """How many ranks, what each takes, how many steps they commit, and how many of those are lost."""
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


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(30, 90),
    crews=st.lists(lives(), max_size=6),
    tail=st.sampled_from(sorted(TAILS)),
    shuffle=st.booleans(),
)
def test_exactly_once(length: int, crews: list[dict[str, Any]], tail: str, shuffle: bool) -> None:
    """Over epochs, failures, ranks, weights and batches: a sample of a committed step counts once in its epoch."""
    epochs = 3
    done: list[list[int]] = [[] for _ in range(epochs)]
    most = [0] * epochs  # samples that may be dropped
    state: dict[str, Any] = {}
    for life in [*crews, {"size": 2, "options": {"batch_size": 3}, "survived": 10**9, "lost": 0, "ahead": 0}]:
        loaders = crew(Numbers(length), life["size"], **TAILS[tail], shuffle=shuffle, **life["options"])
        for loader in loaders if state else []:
            loader.load_state_dict(kept(state))
        committed = [(loaders[0].state_dict(), loaders[0].epoch, list[int]())]
        for epoch in range(loaders[0].epoch, epochs):
            most[epoch] = max(most[epoch], loaders[0].global_batch - 1)
            for loader in loaders:
                loader.set_epoch(epoch)
            for step in stepped(loaders, life["survived"] + 1 - len(committed)):
                committed.append((loaders[0].state_dict(), epoch, step))
            if len(committed) > life["survived"]:
                break
        for loader in loaders:
            list(islice(loader, life["ahead"]))
        committed = committed[: max(1, len(committed) - life["lost"])]
        state = committed[-1][0]
        for _, epoch, step in committed:
            done[epoch] += step
    for epoch, samples in enumerate(done):
        assert max(Counter(samples).values()) == 1
        assert length - len(samples) <= (most[epoch] if tail == "drop" else 0)
        # And in the order of the epoch, whoever took them.
        assert samples == list(islice(Order(length, epoch=epoch, shuffle=shuffle), len(samples)))


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_not_change_what_comes(workers: int) -> None:
    kept = {"persistent_workers": True} if workers else {}
    loaders = crew(Numbers(22), 2, batch_size=3, shuffle=True, drop_last=False, num_workers=workers, **kept)
    for epoch in range(2):
        assert flat(train(loaders)) == list(Order(22, epoch=epoch))
    assert flat(train(loaders, 2)) == [Order(22, epoch=2)[place] for place in range(12)]
    assert loaders[0].position == Position(2, 12)  # and not what the workers have fetched


def test_another_number_of_ranks_goes_on_with_the_rest() -> None:
    before = crew(Numbers(30), 4, batch_size=2, shuffle=True, drop_last=False)
    done = flat(train(before, 2))
    after = handed_on(before, crew(Numbers(30), 3, batch_size=3, shuffle=True, drop_last=False, weights=[1, 1, 0.5]))
    assert after[0].batches == (4, 3, 2)
    done += flat(train(after))
    assert done == list(Order(30))


def test_an_epoch_that_has_ended_stays_ended() -> None:
    """What comes after the loop of that epoch was not done yet: a resumed run has to come by there."""
    before = crew(Numbers(10), 1, batch_size=4, drop_last=True)
    train(before, 2)
    (after,) = handed_on(before, crew(Numbers(10), 2, batch_size=1, drop_last=True)[:1])
    after.set_epoch(0)
    assert (list(after), after.epoch) == ([], 0)
    assert (len(list(after)), after.epoch) == (5, 1)


def test_set_epoch() -> None:
    (loader,) = crew(Numbers(4), 1, batch_size=2)
    train([loader], 1)
    loader.set_epoch(0)  # goes on
    assert flat(train([loader])) == [2, 3]
    loader.set_epoch(0)  # was gone through: again
    assert flat(train([loader])) == [0, 1, 2, 3]
    train([loader], 1)
    assert loader.position == Position(1, 2)
    loader.set_epoch(7)
    assert loader.position == Position(7)


def test_an_uneven_step_averages_by_sample() -> None:
    """Each rank's mean loss, scaled and averaged over ranks as DDP does, is the mean over samples."""
    for tail in ("uneven", "pad"):
        loaders = crew(Numbers(13), 3, batch_size=2, **TAILS[tail], weights=[3, 2, 1])
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
def test_a_tensor_data_set_comes_as_torch_gives_it(workers: int) -> None:
    tensors = TensorDataset(torch.arange(40).view(20, 2), torch.arange(20.0), torch.arange(20) > 9)
    (ours,) = crew(tensors, 1, batch_size=6, drop_last=False, num_workers=workers)
    for batch, theirs in zip(ours, DataLoader(tensors, batch_size=6), strict=True):
        assert type(batch) is type(theirs)
        for tensor, expected in zip(batch, theirs, strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


def test_read_twice_at_a_time_is_refused() -> None:
    (loader,) = crew(Numbers(8), 1, batch_size=2)
    with pytest.raises(UsageError, match="at the same time"):
        list(zip(loader, loader, strict=True))


def test_even_steps_need_no_scale() -> None:
    for loader in crew(Numbers(9), 3, batch_size=1):
        assert loader.scale == 1.0
        assert [loader.scale for _ in loader] == [1.0, 1.0, 1.0]


def test_length_is_that_of_an_epoch() -> None:
    lengths = {tail: len(crew(Numbers(11), 2, batch_size=2, **TAILS[tail])[0]) for tail in TAILS}
    assert lengths == {"drop": 2, "pad": 3, "uneven": 3}


def test_a_collate_function_of_ones_own() -> None:
    (loader,) = crew(Numbers(4), 1, batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]
    (loader,) = crew(Stream(4), 1, batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]


# Random numbers


class Noisy(Numbers):
    """Augments with whatever there is."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, noise()


class NoisyStream(Stream):
    """Shuffles with no seed, as one should not, and augments."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        numbers = list(range(self.length))
        random.shuffle(numbers)
        for number in numbers:
            yield number, noise()


class NoisyParts(NoisyStream):
    def __init__(self, length: int, start: int = 0) -> None:
        super().__init__(length)
        self.start = start

    def shard(self, index: int, count: int) -> NoisyParts:
        if count == 1:
            return self
        return NoisyParts(self.length + index, 100 * index)  # of different lengths

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, heard in super().__iter__():
            yield self.start + number, heard


class NoisyTelling(Telling):
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number in super().__iter__():
            yield number, noise()


class Walk:
    """An iterator that can tell where it is."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Walk:
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


class NoisyWalk(Telling):
    def __iter__(self) -> Walk:  # type: ignore[override]
        return Walk(self.length)


def noise() -> torch.Tensor:
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def masked(samples: list[Any]) -> tuple[list[int], torch.Tensor]:
    """Collates, and draws for it."""
    return [index for index, _ in samples], torch.stack([heard for _, heard in samples]) + noise()


def heard(loader: Loader, steps: int | None = None) -> list[tuple[list[int], list[list[float]]]]:
    found = []
    for indices, sounds in islice(loader, steps):
        found.append((indices, sounds.tolist()))
        loader.commit()
    return found


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make_data", [Noisy, NoisyStream, NoisyParts, NoisyTelling, NoisyWalk])
def test_a_resumed_run_draws_what_it_would_have(make_data: Any, workers: int) -> None:
    def make() -> Loader:
        return crew(make_data(14), 1, batch_size=2, drop_last=False, num_workers=workers, collate_fn=masked)[0]

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    whole = heard(make())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = make()
    batches = iter(before)
    done = [(indices, sounds.tolist()) for indices, sounds in islice(batches, 3)]
    before.commit()
    after = make()
    after.load_state_dict(kept(before.state_dict()))
    assert (after.state_dict()["workers"] is not None) is isinstance(before.dataset, Telling)
    del batches
    assert done + heard(after) == whole
    assert len({sound for _, sounds in whole for row in sounds for sound in row}) == 3 * len(
        [index for indices, _ in whole for index in indices]
    )


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(9), Stream(9), NoisyStream(9), NoisyParts(4)])
def test_the_trainings_own_random_numbers_are_left_alone(dataset: Any, workers: int) -> None:
    """Else a resumed run would draw other numbers than one that never stopped."""
    (loader,) = crew(dataset, 1, batch_size=2, num_workers=workers)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(loader)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_without_a_seed_is_the_same_to_all(workers: int) -> None:
    def indices(loaders: list[Loader], steps: int | None = None) -> list[int]:
        found = []
        for batches in islice(zip(*loaders, strict=True), steps):
            found += [index for batch in batches for index in batch[0]]
            for loader in loaders:
                loader.commit()
        return found

    options: dict[str, Any] = {"drop_last": False, "num_workers": workers, "collate_fn": masked}
    before = crew(NoisyStream(30), 3, batch_size=2, **options)
    done = indices(before, 2)
    after = handed_on(before, crew(NoisyStream(30), 2, batch_size=3, **options))
    done += indices(after)
    assert sorted(done) == list(range(30))
    assert done != sorted(done)
    assert indices(after) != done  # the next epoch


@keeps_handler
def test_whoever_seeds_workers_is_not_disturbed() -> None:
    def mine(worker: int) -> None:
        assert get_worker_info().dataset is dataset
        random.seed(worker)

    dataset = Noisy(4)
    (loader,) = crew(dataset, 1, batch_size=2, num_workers=1, worker_init_fn=mine, collate_fn=masked)
    dice = random.Random(0)
    assert heard(loader)[0][1][0][0] == pytest.approx(dice.random() + [dice.random() for _ in range(2)][1])


# Workers


@keeps_handler
@pytest.mark.parametrize("dataset", [Numbers(40), Stream(40), Telling(40)], ids=["index", "stream", "telling"])
def test_workers_end_with_the_loop_that_is_left(dataset: Any) -> None:
    (loader,) = crew(dataset, 1, batch_size=2, num_workers=2, prefetch_factor=3)
    before = set(descendants(os.getpid()))
    for _ in loader:
        assert len(set(descendants(os.getpid())) - before) == 2
        break
    assert set(descendants(os.getpid())) == before


@keeps_handler
def test_workers_persist_from_epoch_to_epoch() -> None:
    (loader,) = crew(Numbers(40), 1, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
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


# From front to back


@settings(max_examples=50, deadline=None)
@given(length=st.integers(0, 60), crews=st.lists(lives(), max_size=4), tail=st.sampled_from(sorted(TAILS)))
def test_a_stream_is_dealt_as_if_it_had_an_index(length: int, crews: list[dict[str, Any]], tail: str) -> None:
    loaders: list[Loader] = []
    done: list[int] = []
    most = 0
    for life in [*crews, {"size": 2, "options": {"batch_size": 3}, "survived": None, "ahead": 0}]:
        new = crew(Stream(length), life["size"], **TAILS[tail], **life["options"])
        loaders = handed_on(loaders, new) if loaders else new
        done += flat(train(loaders, life["survived"]))
        most = max(most, loaders[0].global_batch - 1)
        if loaders[0]._cursor.finished:
            break
        list(islice(loaders[0], life["ahead"]))  # and not committed
    assert done == list(range(len(done)))
    assert length - len(done) <= (most if tail == "drop" else 0)


@keeps_handler
def test_workers_do_not_change_what_a_stream_gives() -> None:
    loaders = crew(Stream(23), 2, batch_size=2, drop_last=False, num_workers=2)
    assert flat(train(loaders, 3)) == list(range(12))
    assert [loader.dataset.epoch for loader in loaders] == [0, 0]
    loaders = handed_on(loaders, crew(Stream(23), 1, batch_size=3, pad_last=True, num_workers=2))
    assert flat(train(loaders)) == list(range(12, 23))
    assert flat(train(loaders, 1)) == [0, 1, 2]
    assert loaders[0].dataset.epoch == 1


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_can_tell_is_asked(workers: int) -> None:
    (before,) = crew(Telling(20), 1, batch_size=3, drop_last=False, num_workers=workers)
    batches = iter(before)
    done = [n for _ in range(3) for n in next(batches).tolist()]
    before.commit()
    state = json.loads(json.dumps(before.state_dict()))
    del batches
    assert state["workers"] is not None
    (after,) = crew(Telling(20), 1, batch_size=3, drop_last=False, num_workers=workers)
    after.load_state_dict(state)
    assert after.state_dict() == state
    assert done + flat(train([after])) == list(range(20))
    if not workers:
        assert after.dataset.began == 9  # nothing was read again


def test_a_stream_that_can_tell_goes_on_at_another_number_of_ranks() -> None:
    before = crew(Telling(20), 1, batch_size=3, drop_last=False)
    done = flat(train(before, 2))
    after = [Loader(Telling(20), Here(rank, 2), batch_size=2, drop_last=False) for rank in range(2)]
    done += flat(train(handed_on(before, after)))
    assert done == list(range(20))


def test_a_stream_that_can_tell_can_be_left_and_read_again() -> None:
    loaders = crew(Telling(9), 1, batch_size=2, drop_last=False)
    done = flat(train(loaders, 2))
    done += flat(train(loaders, 1))
    next(iter(loaders[0]))  # not committed
    done += flat(train(loaders))
    assert done == list(range(9))
    assert flat(train(loaders)) == list(range(9))


def test_without_torchdata_a_stream_that_can_tell_is_read_again_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)  # as if it were not installed
    with pytest.warns(UserWarning, match=r"pip install phalanx\[data\]"):
        before = crew(Telling(9), 1, batch_size=3)
    done = flat(train(before, 1))
    with pytest.warns(UserWarning, match="read again"):
        after = handed_on(before, crew(Telling(9), 1, batch_size=3))
    assert done + flat(train(after)) == list(range(9))


@keeps_handler
def test_parts_that_can_tell_are_asked() -> None:
    class Parts(Telling):
        def shard(self, index: int, count: int) -> Parts:
            part = Parts(self.length + index)  # uneven
            part.at = 0
            return part

    (before,) = crew(Parts(7), 1, batch_size=2, drop_last=False, num_workers=2)
    whole = train(crew(Parts(7), 1, batch_size=2, drop_last=False, num_workers=2))
    batches = iter(before)
    done = [next(batches).tolist() for _ in range(3)]
    before.commit()
    state = before.state_dict()
    del batches
    assert state["workers"] is not None
    (after,) = crew(Parts(7), 1, batch_size=2, drop_last=False, num_workers=2)
    after.load_state_dict(state)
    assert done + train([after]) == whole
    assert sorted(flat(whole)) == sorted([*range(7), *range(8)])


@pytest.mark.warmed
def test_two_ranks_with_parts_of_their_own_end_together(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "scripts" / "shards.py")
    result = phalanx("run", "-g", "2", "--cpu", script, str(tmp_path))
    assert result.code == 0, result.err
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    steps = [[case["steps"] for case in rank] for rank in said]
    counted = [sorted(both["counted"] + other["counted"]) for both, other in zip(*said, strict=True)]
    assert steps[0] == steps[1] == [3, 3, 1, 2, 5, 4, 2]
    uneven = [0, 1, 2, 3, 4, 1000, 1001]
    assert counted[:3] == [uneven, uneven, [0, 1, 1000, 1001]]
    assert counted[3] == [0, 1, 2]  # rank 1 has no part at all, and steps along
    assert counted[4] == [0, 1, 2, 3, 4, 1000, 1001, 1002, 1003, 3000, 3001, 3002]
    assert counted[5] == [*range(7), *range(1000, 1005)]  # resumed
    assert counted[6] == list(range(7))  # a plain stream
    assert said[0][0]["scales"] == [1.0, 2.0, 2.0]
    assert said[1][0]["scales"] == [1.0, 0.0, 0.0]


class Parts(Stream):
    """Part 0 has most of it, and the last ones may have nothing."""

    def __init__(self, length: int, index: int = 0, count: int = 1) -> None:
        super().__init__(length)
        self.index, self.count = index, count

    def shard(self, index: int, count: int) -> Parts:
        return Parts(self.length, index, count)

    def __iter__(self) -> Iterator[int]:
        cut = self.length * 3 // 5 if self.count > 1 else self.length
        yield from range(cut) if not self.index else range(cut + self.index - 1, self.length, max(1, self.count - 1))


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(0, 40),
    ranks=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4),
    tail=st.sampled_from(sorted(TAILS)),
)
def test_parts_go_on_at_any_number_of_ranks(length: int, ranks: list[tuple[int, int, int]], tail: str) -> None:
    done: list[int] = []
    loaders: list[Loader] = []
    for number, (size, batch, survived) in enumerate([*ranks, (2, 2, None)]):
        new = council(Parts(length), size, batch_size=batch, **TAILS[tail])
        loaders = handed_on(loaders, new) if number else new
        done += flat(meet(loaders, survived))
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        assert loaders[0].position.consumed == len(done)
        if loaders[0]._cursor.finished:
            break
    assert max(Counter(done).values(), default=1) == 1
    assert set(done) <= set(range(length))
    if tail != "drop":
        assert len(done) == length
    assert sorted(flat(meet(council(Parts(length), 3, batch_size=2, drop_last=False)))) == list(range(length))


@keeps_handler
@pytest.mark.parametrize("steps", [6, 14])
def test_parts_of_workers_go_on_at_another_number_of_ranks_and_workers(steps: int) -> None:
    """After 14 steps one of the two parts is through, and its last batch was a short one."""
    (before,) = council(Parts(31), 1, batch_size=2, num_workers=2, drop_last=False)
    done = flat(meet([before], steps))
    (after,) = council(Parts(31), 1, batch_size=3, num_workers=1, drop_last=False)
    done += flat(meet(handed_on([before], [after]), 1))
    done += flat(meet(handed_on([after], council(Parts(31), 2, batch_size=1, drop_last=False))))
    assert sorted(done) == list(range(31))


def test_parts_go_on_after_batches_that_were_not_committed() -> None:
    (loader,) = council(Parts(20), 1, batch_size=3, drop_last=False)
    done = flat(meet([loader], 2))
    list(islice(loader, 3))
    done += flat(meet([loader], 1))
    done += flat(meet(handed_on([loader], council(Parts(20), 2, batch_size=1, drop_last=False))))
    assert sorted(done) == list(range(20))


class TellingParts(Telling):
    def shard(self, index: int, count: int) -> TellingParts:
        return TellingParts(self.length + 6 * index)


@keeps_handler
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_part_that_has_ended_does_not_begin_again(steps: int) -> None:
    """One of the two workers is through long before the other, and its data set at the start again."""

    def make() -> Loader:
        return crew(TellingParts(2), 1, batch_size=2, drop_last=False, num_workers=2)[0]

    whole = train([make()])
    assert len(whole) == 5
    before = make()
    batches = iter(before)
    done = [next(batches).tolist() for _ in range(steps)]
    before.commit()
    state = kept(before.state_dict())
    del batches
    after = make()
    after.load_state_dict(state)
    assert done + train([after]) == whole


class Calendar(Telling):
    """Tells its epoch as well."""

    def __iter__(self) -> Iterator[int]:
        yield from (100 * self.epoch + number for number in super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def test_a_stream_that_was_left_has_the_next_epoch_when_it_is_due() -> None:
    (loader,) = crew(Calendar(6), 1, batch_size=2)
    assert flat(train([loader], 2)) == [0, 1, 2, 3]
    loader.set_epoch(1)
    assert flat(train([loader], 2)) == [100, 101, 102, 103]


class Odd(Telling):
    """A state that JSON alone would change."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,), 7: torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.at,) = state["at"]
        assert isinstance(state["at"], tuple)
        assert state[7].tolist() == [self.at]


@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_of_a_stream_go_on_by_the_state_of_rank_0(size: int) -> None:
    def make() -> list[Loader]:
        return [Loader(Odd(20), Here(rank, size), batch_size=2, drop_last=False) for rank in range(size)]

    before = make()
    batches = zip(*before, strict=True)
    done = [[n for batch in next(batches) for n in batch.tolist()] for _ in range(3)]
    for loader in before:
        loader.commit()
    state = kept(before[0].state_dict())
    after = make()
    for loader in after:
        loader.load_state_dict(state)
    assert flat(done + train(after)) == list(range(20))
    assert [loader.dataset.began for loader in after] == [6 * size] * size  # nothing was read again


@keeps_handler
def test_parts_go_on_with_another_ending() -> None:
    """The short batch of the part that is through counted before, and would not now."""
    (before,) = council(Parts(31), 1, batch_size=2, num_workers=2, drop_last=False)
    done = flat(meet([before], 14))
    (after,) = council(Parts(31), 1, batch_size=2, num_workers=2, drop_last=True)
    done += flat(meet(handed_on([before], [after])))
    assert sorted(done) == list(range(31))


def test_parts_of_one_rank_need_nobody() -> None:
    class Parts(Stream):
        def shard(self, index: int, count: int) -> Parts:
            assert (index, count) == (0, 1)
            return self

    loaders = crew(Parts(5), 1, batch_size=2, drop_last=False)
    assert train(loaders) == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="not known in advance"):
        len(loaders[0])


# What cannot be


def test_a_state_of_other_data_is_refused() -> None:
    state = crew(Numbers(10), 1, batch_size=2)[0].state_dict()
    assert json.loads(json.dumps(state)) == state
    for other, seen in [
        (crew(Numbers(11), 1, batch_size=2), "length: 10 then, 11 now"),
        (crew(Numbers(10), 1, batch_size=2, seed=5), "seed: 0 then, 5 now"),
        (crew(Numbers(10), 1, batch_size=2, shuffle=True), "shuffle: False then, True now"),
        (crew(Stream(10), 1, batch_size=2), "kind: indexed then, stream now"),
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
        (DataLoader(Numbers(10), 4, shuffle=True), {"batch_size": 2}, "was given a DataLoader"),
        (Stream(10), {"batch_size": 2, "shuffle": True}, "cannot be shuffled"),
        (Stream(10), {"batch_size": 2, "persistent_workers": True}, "persistent_workers"),
        (iter([1, 2]), {"batch_size": 2}, "only once"),
        (7, {"batch_size": 2}, "int is not a data set"),
    ],
)
def test_what_is_refused(dataset: Any, options: dict[str, Any], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        Loader(dataset, Here(), **options)
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
def test_what_happens_to_the_last_samples(options: dict[str, Any], tail: str) -> None:
    assert Loader(Numbers(10), Here(), batch_size=3, **options).tail == tail


def evaluated(loaders: list[Loader]) -> list[list[list[int]]]:
    """The batches of each rank, one rank after the other: nobody waits for anybody."""
    return [[batch.tolist() for batch in loader] for loader in loaders]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Numbers, Stream])
def test_an_evaluation_reads_every_sample_once(make: Callable[[int], Any], workers: int) -> None:
    for length, size, batch in ((301, 3, 50), (10, 3, 3), (7, 2, 1), (2, 3, 4), (9, 1, 4)):
        read = evaluated(crew(make(length), size, batch_size=batch, train=False, num_workers=workers))
        assert sorted(sample for rank in read for part in rank for sample in part) == list(range(length))
        assert len({len(rank) for rank in read}) == 1 or length < size
        if workers == 0:
            again = evaluated(crew(make(length), size, batch_size=batch, train=False))
            assert again == read


def test_an_evaluation_of_shards_asks_nobody() -> None:
    def never(_: int) -> int:
        raise AssertionError("an evaluation must not wait for other ranks")

    read = [
        [batch.tolist() for batch in Loader(Parts(31), Here(rank, 3), batch_size=4, train=False, total=never)]
        for rank in range(3)
    ]
    assert sorted(sample for rank in read for part in rank for sample in part) == list(range(31))


def test_a_loop_without_gradients_is_an_evaluation_if_nothing_else_was_said() -> None:
    loaders = crew(Numbers(10), 3, batch_size=3)
    assert [sum(map(len, rank)) for rank in evaluated(loaders)] == [4, 4, 4]  # with one each that does not count
    with torch.no_grad():
        assert sum(len(part) for rank in evaluated(loaders) for part in rank) == 10
    assert [sum(map(len, rank)) for rank in evaluated(loaders)] == [4, 4, 4]
    with torch.no_grad():
        assert (
            sum(len(part) for rank in evaluated(crew(Numbers(10), 3, batch_size=3, shuffle=True)) for part in rank) == 9
        )


def test_a_cursor_starts_at_the_last_commit() -> None:
    cursor = LoaderCursor()
    assert cursor.start() == (Position(), 0, None)
    cursor.advance(Position(0, 8))
    cursor.commit()
    assert cursor.workers_at_commit
    cursor.advance(Position(0, 16))
    assert not cursor.workers_at_commit  # they are ahead of it
    assert cursor.start() == (Position(0, 8), 1, None)


def test_a_cursor_goes_to_the_next_epoch_when_one_is_finished() -> None:
    cursor = LoaderCursor()
    cursor.go_to(Position(2, 24), 3)
    cursor.resume = {"workers": 1}
    assert cursor.start() == (Position(2, 24), 3, {"workers": 1})
    assert cursor.resume is None
    cursor.finished = True
    assert cursor.start() == (Position(3), 0, None)
