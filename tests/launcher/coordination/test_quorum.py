"""Which side of a broken network continues: a table, and all splits of up to six nodes."""

from __future__ import annotations

import itertools

import pytest

from phalanx.launcher.coordination.quorum import Electorate


@pytest.mark.parametrize(
    ("order", "ended", "here", "elected"),
    [
        # Node 0 has ended.
        ((0, 1), {0}, {1}, True),  # of two nodes, the other one continues
        ((0, 1, 2), {0}, {1, 2}, True),
        ((0, 1, 2), {0}, {1}, True),  # 1 and 2 do not reach each other: the first of them
        ((0, 1, 2), {0}, {2}, False),
        ((0, 1, 2), {0, 1}, {2}, True),  # 1 has ended too
        ((0, 1, 2, 3), {0}, {1}, False),
        ((0, 1, 2, 3), {0}, {2, 3}, True),
        ((0, 1, 2, 3, 4), {0}, {1, 2}, True),
        ((0, 1, 2, 3, 4), {0}, {3, 4}, False),
        # Node 0 may still run.
        ((0, 1), (), {1}, False),
        ((0, 1), (), {0}, True),
        ((0, 1, 2), (), {1, 2}, True),
        ((0, 1, 2), (), {1}, False),
        ((0, 1, 2, 3), (), {2, 3}, False),
        ((0, 1, 2, 3), {3}, {1, 2}, True),
        # Node 1 leads, and node 0 has joined again.
        ((1, 0, 2), {1}, {0}, True),
        ((1, 0, 2), {1}, {2}, False),
        ((0,), {0}, set(), False),
    ],
)
def test_table(order: tuple[int, ...], ended: set[int], here: set[int], elected: bool) -> None:
    assert Electorate(order, frozenset(ended)).elects(here) is elected


def test_at_most_one_side_continues_and_one_of_two_always_does() -> None:
    for size in range(1, 7):
        order = tuple(range(size))
        for ended in (frozenset(some) for count in range(size) for some in itertools.combinations(order, count)):
            electorate = Electorate(order, ended)
            for side in (set(some) for count in range(size + 1) for some in itertools.combinations(order, count)):
                other = set(order) - side
                assert electorate.elects(side) + electorate.elects(other) == 1, (order, ended, side)


def test_the_message_about_missing_nodes() -> None:
    found = Electorate((0, 1, 2, 3), frozenset({0})).missing({3})
    assert found.startswith("1 of 3 nodes are here, and nodes 1, 2 cannot be reached: they may continue the run; ")
