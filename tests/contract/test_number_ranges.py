"""Numbers as text with ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.contract.ranks import number_ranges


@given(st.sets(st.integers(0, 200)))
def test_what_is_encoded_is_decoded(numbers: set[int]) -> None:
    ranges = number_ranges.encode(sorted(numbers))
    assert number_ranges.decode(ranges, 1000) == numbers
    assert len(ranges) == sum(number - 1 not in numbers for number in numbers)  # as short as possible


def test_another_node_cannot_make_it_long() -> None:
    assert number_ranges.decode(((0, 1 << 40), (7, 3)), 5) == {0, 1, 2, 3, 4}
    assert number_ranges.decode(((7, 3),), 5) == frozenset()
