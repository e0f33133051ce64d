"""Data sets that divide themselves into shards."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.data.loader import Loader
from tests.kit.cli import phalanx
from tests.train.data.datasets import Shards, StatefulStream, Stream
from tests.train.data.loaders import (
    TAILS,
    agreeing_loaders,
    flat,
    keeps_handler,
    loaders_of,
    restored,
    resumed,
    train,
    train_in_threads,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it


@keeps_handler
def test_stateful_shards_resume_from_their_state() -> None:
    class Shards(StatefulStream):
        def shard(self, index: int, count: int) -> Shards:
            part = Shards(self.length + index)  # uneven
            part.at = 0
            return part

    (before,) = loaders_of(Shards(7), 1, batch_size=2, drop_last=False, num_workers=2)
    whole = train(loaders_of(Shards(7), 1, batch_size=2, drop_last=False, num_workers=2))
    batches = iter(before)
    done = [next(batches).tolist() for _ in range(3)]
    before.commit()
    state = before.state_dict()
    del batches
    assert state["workers"] is not None
    (after,) = loaders_of(Shards(7), 1, batch_size=2, drop_last=False, num_workers=2)
    after.load_state_dict(state)
    assert done + train([after]) == whole
    assert sorted(flat(whole)) == sorted([*range(7), *range(8)])


@pytest.mark.warmed
def test_two_ranks_with_uneven_shards_end_together(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[1] / "scripts" / "shards.py")
    result = phalanx("run", "-g", "2", "--cpu", script, str(tmp_path))
    assert result.code == 0, result.err
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    steps = [[case["steps"] for case in rank] for rank in results]
    counted = [sorted(both["counted"] + other["counted"]) for both, other in zip(*results, strict=True)]
    assert steps[0] == steps[1] == [3, 3, 1, 2, 5, 4, 2]
    uneven = [0, 1, 2, 3, 4, 1000, 1001]
    assert counted[:3] == [uneven, uneven, [0, 1, 1000, 1001]]
    assert counted[3] == [0, 1, 2]  # rank 1 has no shard, and takes the same steps
    assert counted[4] == [0, 1, 2, 3, 4, 1000, 1001, 1002, 1003, 3000, 3001, 3002]
    assert counted[5] == [*range(7), *range(1000, 1005)]  # resumed
    assert counted[6] == list(range(7))  # a plain stream
    assert results[0][0]["scales"] == [1.0, 2.0, 2.0]
    assert results[1][0]["scales"] == [1.0, 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(0, 40),
    ranks=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4),
    tail=st.sampled_from(sorted(TAILS)),
)
def test_shards_resume_with_any_number_of_ranks(length: int, ranks: list[tuple[int, int, int]], tail: str) -> None:
    done: list[int] = []
    loaders: list[Loader] = []
    for number, (size, batch, survived) in enumerate([*ranks, (2, 2, None)]):
        new = agreeing_loaders(Shards(length), size, batch_size=batch, **TAILS[tail])
        loaders = resumed(loaders, new) if number else new
        done += flat(train_in_threads(loaders, survived))
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        assert loaders[0].position.consumed == len(done)
        if loaders[0]._cursor.finished:
            break
    assert max(Counter(done).values(), default=1) == 1
    assert set(done) <= set(range(length))
    if tail != "drop":
        assert len(done) == length
    assert sorted(flat(train_in_threads(agreeing_loaders(Shards(length), 3, batch_size=2, drop_last=False)))) == list(
        range(length)
    )


@keeps_handler
@pytest.mark.parametrize("steps", [6, 14])
def test_shards_of_workers_resume_with_another_number_of_ranks_and_workers(steps: int) -> None:
    """After 14 steps one of the two shards is finished, and its last batch was a short one."""
    (before,) = agreeing_loaders(Shards(31), 1, batch_size=2, num_workers=2, drop_last=False)
    done = flat(train_in_threads([before], steps))
    (after,) = agreeing_loaders(Shards(31), 1, batch_size=3, num_workers=1, drop_last=False)
    done += flat(train_in_threads(resumed([before], [after]), 1))
    done += flat(train_in_threads(resumed([after], agreeing_loaders(Shards(31), 2, batch_size=1, drop_last=False))))
    assert sorted(done) == list(range(31))


def test_shards_resume_after_uncommitted_batches() -> None:
    (loader,) = agreeing_loaders(Shards(20), 1, batch_size=3, drop_last=False)
    done = flat(train_in_threads([loader], 2))
    list(islice(loader, 3))
    done += flat(train_in_threads([loader], 1))
    done += flat(train_in_threads(resumed([loader], agreeing_loaders(Shards(20), 2, batch_size=1, drop_last=False))))
    assert sorted(done) == list(range(20))


class StatefulShards(StatefulStream):
    def shard(self, index: int, count: int) -> StatefulShards:
        return StatefulShards(self.length + 6 * index)


@keeps_handler
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_finished_shard_is_not_read_again(steps: int) -> None:
    """One of the two workers finishes long before the other, and its data set is at the start again."""

    def make() -> Loader:
        return loaders_of(StatefulShards(2), 1, batch_size=2, drop_last=False, num_workers=2)[0]

    whole = train([make()])
    assert len(whole) == 5
    before = make()
    batches = iter(before)
    done = [next(batches).tolist() for _ in range(steps)]
    before.commit()
    state = restored(before.state_dict())
    del batches
    after = make()
    after.load_state_dict(state)
    assert done + train([after]) == whole


@keeps_handler
def test_shards_resume_with_another_drop_last() -> None:
    """The short batch of the finished shard counted before, and would not count now."""
    (before,) = agreeing_loaders(Shards(31), 1, batch_size=2, num_workers=2, drop_last=False)
    done = flat(train_in_threads([before], 14))
    (after,) = agreeing_loaders(Shards(31), 1, batch_size=2, num_workers=2, drop_last=True)
    done += flat(train_in_threads(resumed([before], [after])))
    assert sorted(done) == list(range(31))


def test_the_shard_of_a_single_rank_is_the_whole_data_set() -> None:
    class Shards(Stream):
        def shard(self, index: int, count: int) -> Shards:
            assert (index, count) == (0, 1)
            return self

    loaders = loaders_of(Shards(5), 1, batch_size=2, drop_last=False)
    assert train(loaders) == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="not known in advance"):
        len(loaders[0])
