"""Every sample once per epoch, with any failures and any number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UsageError
from phalanx.train.data.order import Order, Position, Tail, apportion, count_steps, deal, share, steps

TAILS: list[Tail] = ["drop", "pad", "uneven"]
fast = settings(max_examples=100, deadline=None)
worlds = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


# The order


@fast
@given(length=st.integers(0, 3000), seed=st.integers(-5, 2**70), epoch=st.integers(0, 10**6))
def test_an_order_has_every_index_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(Order(length, seed=seed, epoch=epoch)) == list(range(length))


def test_the_order_never_changes() -> None:
    # A checkpoint must resume with later versions and on other machines, so these numbers must not change.
    assert list(Order(10, seed=0)) == [7, 8, 9, 6, 3, 4, 0, 5, 1, 2]
    assert list(Order(10, seed=0, epoch=1)) == [2, 7, 1, 6, 0, 5, 3, 9, 8, 4]
    assert Order(10**12)[5] == 651483765839
    assert list(Order(4, shuffle=False)) == [0, 1, 2, 3]


def test_seed_epoch_and_length_each_give_another_order() -> None:
    orders = [Order(500), Order(500, seed=1), Order(500, epoch=1), Order(501)]
    assert len({tuple(order[place] for place in range(20)) for order in orders}) == 4


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_permutation_is_as_likely(length: int) -> None:
    number = math.factorial(length)
    seen = Counter(tuple(Order(length, seed=seed)) for seed in range(40 * number))
    surprise = sum((times - 40) ** 2 / 40 for times in seen.values()) + 40 * (number - len(seen))
    assert surprise < number + 4 * math.sqrt(2 * number)  # chi-squared, with its deviation


def test_neighbours_do_not_stay_neighbours() -> None:
    order = Order(20_000, seed=3)
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 12  # two are expected
    assert abs(sum(order[place] for place in range(10_000)) / 10_000 - 10_000) < 200


def test_a_place_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        Order(10)[10]


# Dealing it out


def taken(
    position: Position, length: int, batches: tuple[int, ...], tail: Tail, at_most: int = 10**9
) -> tuple[list[int], Position]:
    """Return the counted places of up to `at_most` steps, in rank order; each step is checked."""
    places: list[int] = []
    for number, step in enumerate(steps(position, length, batches, tail)):
        if number == at_most:
            break
        portions = [step.portion(rank) for rank in range(len(batches))]
        assert all(1 <= len(portion.places) <= batch for portion, batch in zip(portions, batches, strict=True))
        assert all(0 <= place < length for portion in portions for place in portion.places)
        assert sum(portion.count for portion in portions) == step.total
        assert sum(step.scale(rank) for rank in range(len(batches))) == pytest.approx(len(batches))
        assert position.consumed < step.next.consumed <= length
        places += [place for portion in portions for place in portion.places[: portion.count]]
        position = step.next
    return places, position


@fast
@given(
    length=st.integers(0, 200),
    lives=st.lists(st.tuples(worlds, st.integers(0, 6)), min_size=1, max_size=5),
    tail=st.sampled_from(TAILS),
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
)
def test_exactly_once(
    length: int, lives: list[tuple[tuple[int, ...], int]], tail: Tail, shuffle: bool, epochs: int
) -> None:
    """Each phase has ranks with their batches, and ends after some committed steps; the last one runs to the end."""
    for epoch in range(epochs):
        position = Position(epoch)
        places: list[int] = []
        for batches, survived in lives[:-1]:
            more, position = taken(position, length, batches, tail, survived)
            places += more
        before = position.consumed
        more, position = taken(position, length, lives[-1][0], tail)
        places += more
        assert places == list(range(len(places)))  # none twice, none skipped, in order
        order = Order(length, epoch=epoch, shuffle=shuffle)
        assert len({order[place] for place in places}) == len(places)
        if tail == "drop":
            assert length - len(places) < max(sum(batches) for batches, _ in lives)
            if before == len(places) - len(more):  # the tail was not dropped before
                assert length - len(places) == (length - before) % sum(lives[-1][0])
        else:
            assert len(places) == length
            assert position.consumed == length


@fast
@given(length=st.integers(1, 200), batches=worlds, tail=st.sampled_from(TAILS))
def test_an_epoch_has_as_many_steps_as_it_says(length: int, batches: tuple[int, ...], tail: Tail) -> None:
    assert len(list(steps(Position(), length, batches, tail))) == count_steps(length, batches, tail)
    places, position = taken(Position(), length, batches, tail)
    assert len(places) == (length - length % sum(batches) if tail == "drop" else length)
    if places:
        assert position.consumed == length
        assert share(position, length, (1,), tail) is None  # complete, also for smaller batches


@fast
@given(length=st.integers(0, 200), one=worlds, data=st.data(), tail=st.sampled_from(TAILS))
def test_a_step_takes_the_same_samples_at_any_number_of_ranks(
    length: int, one: tuple[int, ...], data: st.DataObject, tail: Tail
) -> None:
    whole = sum(one)
    other = deal(whole, data.draw(st.integers(1, whole)))
    both = [
        [(step.position, step.next, step.total) for step in steps(Position(), length, batches, tail)]
        for batches in (one, other)
    ]
    assert both[0] == both[1]


def test_the_three_endings() -> None:
    def ending(tail: Tail) -> list[tuple[list[int], int]] | None:
        step = share(Position(0, 8), 11, (2, 2, 2), tail)
        return step and [(list(part.places), part.count) for part in map(step.portion, range(3))]

    assert ending("drop") is None
    assert ending("pad") == [([8, 9], 2), ([10, 0], 1), ([1, 2], 0)]
    assert ending("uneven") == [([8], 1), ([9], 1), ([10], 1)]


@fast
@given(length=st.integers(0, 200), batches=worlds)
def test_an_evaluation_has_every_sample_once_and_no_padding(length: int, batches: tuple[int, ...]) -> None:
    every = list(steps(Position(), length, batches, "every"))
    assert len(every) == count_steps(length, batches, "every")
    assert [place for step in every for rank in range(len(batches)) for place in step.portion(rank).places] == [
        *range(length)
    ]
    for step in every:
        assert step.sizes == step.counts
        assert all(size <= batch + 1 for size, batch in zip(step.sizes, batches, strict=True))
        assert all(step.sizes) or length < len(batches)  # otherwise all ranks have the same number of batches


def test_a_rank_without_samples_steps_along_with_one_that_does_not_count() -> None:
    step = share(Position(0, 4), 5, (2, 2), "uneven")
    assert step is not None
    assert [(list(part.places), part.count) for part in map(step.portion, range(2))] == [([4], 1), ([0], 0)]
    assert [step.scale(0), step.scale(1)] == [2.0, 0.0]


def test_padding_for_less_than_one_batch_goes_round() -> None:
    step = share(Position(), 2, (3, 2), "pad")
    assert step is not None
    assert [list(part.places) for part in map(step.portion, range(2))] == [[0, 1, 0], [1, 0]]


# Weights


@pytest.mark.parametrize(
    ("batch", "weights", "sizes"),
    [
        (10, [1, 1, 0.5], (4, 4, 2)),
        (8, None, (3, 3, 2)),
        (3, [1, 1000, 1], (1, 1, 1)),
        (100, [1, 1e9], (1, 99)),
        (7, [0.3, 0.3, 0.1], (3, 3, 1)),
    ],
)
def test_weights_become_whole_batches(batch: int, weights: list[float] | None, sizes: tuple[int, ...]) -> None:
    assert deal(batch, 3 if weights is None else len(weights), weights) == sizes


@fast
@given(total=st.integers(0, 10**6), weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_parts_add_up_and_none_is_off_by_one_or_more(total: int, weights: list[float]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / math.fsum(weights)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("batch", "weights", "seen"),
    [
        (2, [1, 1, 1], "too small for 3 ranks"),
        (9, [1, 1], "2 weights for 3 ranks"),
        (9, [1, 0, 1], "greater than 0"),
        (9, [1, math.nan, 1], "greater than 0"),
    ],
)
def test_weights_that_cannot_be(batch: int, weights: list[float], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        deal(batch, 3, weights)
    assert seen in str(caught.value)
    assert caught.value.fix
