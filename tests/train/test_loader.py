"""What ranks get from their loaders: real DataLoaders with and without workers, restarts, streams, parts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from phalanx.errors import UsageError
from phalanx.train.loader import Loader, look_up
from phalanx.train.order import Order, Position
from tests.kit.cli import phalanx

# torch's DataLoader sets it with its first workers, once and for all, to notice when one of them is killed.
keeps_handler = pytest.mark.leaves("signal:SIGCHLD", why="torch's DataLoader keeps its handler")
needs_torchdata = pytest.mark.skipif(not importlib.util.find_spec("torchdata"), reason="torchdata is not installed")


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


def train(loaders: list[Loader], steps: int | None = None) -> list[list[int]]:
    """What counted, a list for each step of all ranks together; each is committed. All ranks must end together."""
    done: list[list[int]] = []
    if steps == 0:
        return done
    for batches in zip(*loaders, strict=True):
        done.append(
            [n for loader, batch in zip(loaders, batches, strict=True) for n in batch[: loader.last_count].tolist()]
        )
        assert {loader.last_total for loader in loaders} == {len(done[-1])}
        for loader in loaders:
            loader.commit()
        if len(done) == steps:
            break
    return done


def flat(steps: list[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


def handed_on(old: list[Loader], new: list[Loader]) -> list[Loader]:
    for loader in new:
        loader.load_state_dict(json.loads(json.dumps(old[0].state_dict())))
    return new


# With an index


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 2**61) | st.integers(1, 3000), seed=st.integers(0, 99), data=st.data())
def test_many_places_are_looked_up_as_each_is(length: int, seed: int, data: st.DataObject) -> None:
    order = Order(length, seed=seed)
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    assert look_up(order, places) == [order[place] for place in places]


def test_many_steps_are_looked_up_in_several_goes() -> None:
    loaders = crew(Numbers(12_345), 2, batch_size=700, shuffle=True, last="uneven")
    assert flat(train(loaders)) == list(Order(12_345))


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(20, 60),
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4),
    last=st.sampled_from(["drop", "pad", "uneven"]),
)
def test_exactly_once_through_failures_at_any_number_of_ranks(
    length: int, lives: list[tuple[int, int]], last: str
) -> None:
    """The same samples in the same steps as one rank that never failed, for the global batch is the same."""
    options: dict[str, Any] = {"global_batch": 8, "shuffle": True, "last": last}
    alone = crew(Numbers(length), 1, **options)
    epochs = [train(alone) for _ in range(5)]
    for epoch in epochs:
        assert len(set(flat(epoch))) == len(flat(epoch)) == (length // 8 * 8 if last == "drop" else length)
    loaders, done = alone, []
    for number, (size, survived) in enumerate(lives):
        new = crew(Numbers(length), size, **options)
        loaders = handed_on(loaders, new) if number else new
        done += train(loaders, survived)
        for loader in loaders:  # what is taken and not committed comes again
            next(iter(loader), None)
    done += train(handed_on(loaders, crew(Numbers(length), 3, **options)))
    whole = [step for epoch in epochs for step in epoch]
    assert done == whole[: len(done)]
    assert len(done) % len(epochs[0]) == 0


@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_not_change_what_comes(workers: int) -> None:
    kept = {"persistent_workers": True} if workers else {}
    loaders = crew(Numbers(22), 2, batch_size=3, shuffle=True, last="uneven", num_workers=workers, **kept)
    for epoch in range(2):
        assert flat(train(loaders)) == list(Order(22, epoch=epoch))
    assert flat(train(loaders, 2)) == [Order(22, epoch=2)[place] for place in range(12)]
    assert loaders[0].position == Position(2, 12)  # and not what the workers have fetched


def test_another_number_of_ranks_goes_on_with_the_rest() -> None:
    before = crew(Numbers(30), 4, batch_size=2, shuffle=True, last="uneven")
    done = flat(train(before, 2))
    after = handed_on(before, crew(Numbers(30), 3, batch_size=3, shuffle=True, last="uneven", weights=[1, 1, 0.5]))
    assert after[0].batches == (4, 3, 2)
    done += flat(train(after))
    assert done == list(Order(30))


def test_an_epoch_that_has_ended_stays_ended() -> None:
    """What comes after the loop of that epoch was not done yet: a resumed run has to come by there."""
    before = crew(Numbers(10), 1, batch_size=4)
    train(before, 2)
    (after,) = handed_on(before, crew(Numbers(10), 2, batch_size=1)[:1])
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
    for last in ("uneven", "pad"):
        loaders = crew(Numbers(13), 3, batch_size=2, last=last, weights=[3, 2, 1])
        for batches in zip(*loaders, strict=True):
            means, weighed, counted = [], [], []
            for loader, batch in zip(loaders, batches, strict=True):
                losses = batch.double() ** 2
                means.append(losses.mean() * loader.scale)
                weighed.append((losses * loader.sample_weights).sum())
                counted += losses[: loader.last_count].tolist()
            true = sum(counted) / len(counted)
            assert float(sum(weighed)) / 3 == pytest.approx(true)
            if last == "uneven":
                assert float(sum(means)) / 3 == pytest.approx(true)


def test_even_steps_need_no_scale() -> None:
    for loader in crew(Numbers(9), 3, batch_size=1):
        assert loader.scale == 1.0
        assert [loader.scale for _ in loader] == [1.0, 1.0, 1.0]


def test_torchs_own_generator_is_left_alone() -> None:
    """Else a resumed run would draw other numbers than one that never stopped."""
    (loader,) = crew(Numbers(4), 1, batch_size=2, shuffle=True)
    before = torch.random.get_rng_state()
    list(loader)
    assert torch.equal(before, torch.random.get_rng_state())


def test_length_is_that_of_an_epoch() -> None:
    assert [len(crew(Numbers(11), 2, batch_size=2, last=last)[0]) for last in ("drop", "pad", "uneven")] == [2, 3, 3]


def test_a_collate_function_of_ones_own() -> None:
    (loader,) = crew(Numbers(4), 1, batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]
    (loader,) = crew(Stream(4), 1, batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]


# From front to back


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(0, 40),
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
    last=st.sampled_from(["drop", "pad", "uneven"]),
)
def test_a_stream_is_dealt_as_if_it_had_an_index(length: int, lives: list[tuple[int, int]], last: str) -> None:
    loaders, done = crew(Stream(length), 1, global_batch=6, last=last), []
    for size, survived in lives:
        loaders = handed_on(loaders, crew(Stream(length), size, global_batch=6, last=last))
        done += flat(train(loaders, survived))
        if loaders[0]._finished:
            break
    else:
        done += flat(train(handed_on(loaders, crew(Stream(length), 2, global_batch=6, last=last))))
    assert done == list(range(length // 6 * 6 if last == "drop" else length))


@keeps_handler
def test_workers_do_not_change_what_a_stream_gives() -> None:
    loaders = crew(Stream(23), 2, batch_size=2, last="uneven", num_workers=2)
    assert flat(train(loaders, 3)) == list(range(12))
    assert [loader.dataset.epoch for loader in loaders] == [0, 0]
    loaders = handed_on(loaders, crew(Stream(23), 1, batch_size=3, last="pad", num_workers=2))
    assert flat(train(loaders)) == list(range(12, 23))
    assert flat(train(loaders, 1)) == [0, 1, 2]
    assert loaders[0].dataset.epoch == 1


@needs_torchdata
@keeps_handler
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_can_tell_is_asked(workers: int) -> None:
    (before,) = crew(Telling(20), 1, batch_size=3, last="uneven", num_workers=workers)
    batches = iter(before)
    done = [n for _ in range(3) for n in next(batches).tolist()]
    before.commit()
    state = json.loads(json.dumps(before.state_dict()))
    del batches
    assert state["workers"] is not None
    (after,) = crew(Telling(20), 1, batch_size=3, last="uneven", num_workers=workers)
    after.load_state_dict(state)
    assert after.state_dict() == state
    assert done + flat(train([after])) == list(range(20))
    if not workers:
        assert after.dataset.began == 9  # nothing was read again


@needs_torchdata
def test_a_stream_that_can_tell_goes_on_at_another_number_of_ranks() -> None:
    before = crew(Telling(20), 1, batch_size=3, last="uneven")
    done = flat(train(before, 2))
    after = [Loader(Telling(20), Here(rank, 2), batch_size=2, last="uneven") for rank in range(2)]
    done += flat(train(handed_on(before, after)))
    assert done == list(range(20))


@pytest.mark.filterwarnings("ignore:Telling could tell")
def test_a_stream_that_can_tell_can_be_left_and_read_again() -> None:
    loaders = crew(Telling(9), 1, batch_size=2, last="uneven")
    done = flat(train(loaders, 2))
    done += flat(train(loaders, 1))
    next(iter(loaders[0]))  # not committed
    done += flat(train(loaders))
    assert done == list(range(9))
    assert flat(train(loaders)) == list(range(9))


@pytest.mark.skipif(bool(importlib.util.find_spec("torchdata")), reason="torchdata is installed")
def test_without_torchdata_a_stream_that_can_tell_is_read_again_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match=r"pip install phalanx\[data\]"):
        before = crew(Telling(9), 1, batch_size=3)
    done = flat(train(before, 1))
    with pytest.warns(UserWarning, match="read again"):
        after = handed_on(before, crew(Telling(9), 1, batch_size=3))
    assert done + flat(train(after)) == list(range(9))


@needs_torchdata
@keeps_handler
def test_parts_that_can_tell_are_asked() -> None:
    class Parts(Telling):
        def shard(self, index: int, count: int) -> Parts:
            part = Parts(self.length + index)  # uneven
            part.at = 0
            return part

    (before,) = crew(Parts(7), 1, batch_size=2, last="uneven", num_workers=2)
    whole = train(crew(Parts(7), 1, batch_size=2, last="uneven", num_workers=2))
    batches = iter(before)
    done = [next(batches).tolist() for _ in range(3)]
    before.commit()
    state = before.state_dict()
    del batches
    assert state["workers"] is not None
    (after,) = crew(Parts(7), 1, batch_size=2, last="uneven", num_workers=2)
    after.load_state_dict(state)
    assert done + train([after]) == whole
    assert sorted(flat(whole)) == sorted([*range(7), *range(8)])


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


def test_parts_of_one_rank_need_nobody() -> None:
    class Parts(Stream):
        def shard(self, index: int, count: int) -> Parts:
            assert (index, count) == (0, 1)
            return self

    loaders = crew(Parts(5), 1, batch_size=2, last="uneven")
    assert train(loaders) == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="nobody knows"):
        len(loaders[0])
    train(loaders, 1)
    with pytest.raises(UsageError, match="in mid-epoch"):
        handed_on(loaders, crew(Parts(5), 1, batch_size=3, last="uneven"))


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
        (Numbers(10), {"batch_size": 11}, "an epoch has no step: 10 samples, 11 in a step"),
        (Numbers(0), {"batch_size": 1, "last": "pad"}, "an epoch has no step"),
        (Numbers(10), {"batch_size": 2, "last": "trim"}, "last='trim'"),
        (Numbers(10), {"batch_size": 2, "drop_last": True}, "drop_last"),
        (Stream(10), {"batch_size": 2, "shuffle": True}, "cannot be shuffled"),
        (Stream(10), {"batch_size": 2, "persistent_workers": True}, "persistent_workers"),
        (iter([1, 2]), {"batch_size": 2}, "only once"),
        (7, {"batch_size": 2}, "int is no data set"),
    ],
)
def test_what_is_refused(dataset: Any, options: dict[str, Any], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        Loader(dataset, Here(), **options)
    assert seen in str(caught.value)
