"""The short text that says which ranks share a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.contract.ranks import topology


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([[0]], "1"),
        ([[0, 1], [2, 3]], "2*2"),
        ([[0, 1], [2, 3], [4]], "2*2,1"),
        ([[0], [1, 2, 3]], "1,3"),
        ([[0, 2], [1, 3]], "0.2/1.3"),
        ([[1], [0]], "1/0"),
    ],
)
def test_spelling(nodes: list[list[int]], text: str) -> None:
    assert topology.encode(nodes) == text
    assert [list(ranks) for ranks in topology.decode(text)] == nodes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.randoms())
def test_there_and_back(sizes: list[int], random: object) -> None:
    ranks = list(range(sum(sizes)))
    if random.random() < 0.5:  # type: ignore[attr-defined]
        random.shuffle(ranks)  # type: ignore[attr-defined]
    left = iter(ranks)
    nodes = tuple(tuple(sorted(next(left) for _ in range(size))) for size in sizes)
    assert topology.decode(topology.encode(nodes)) == nodes


def test_even_nodes_stay_short() -> None:
    nodes = [range(first, first + 8) for first in range(0, 4096 * 8, 8)]
    assert topology.encode(nodes) == "8*4096"


@pytest.mark.parametrize(
    "text", ["", "0", "a", "2*", "*2", "2,,2", "-1", "0.1/1.2", "0.2", "1.2/3", "9999999999", "8*999999"]
)
def test_invalid_topologies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        topology.decode(text)
