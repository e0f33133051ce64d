"""What the checks of a script conclude from the tensors that its model gets."""

from __future__ import annotations

import pytest

from phalanx.train.misuse.samples import has_batch


@pytest.mark.parametrize(
    ("shapes", "ranks", "whole"),
    [
        ([(32, 10)], 2, True),
        ([(32,)], 4, True),
        ([(5, 32, 10)], 2, True),  # time first
        ([(3,), (32, 10)], 2, True),
        ([(16, 10)], 2, False),
        ([(16, 32)], 2, False),  # a part of a batch with as many features as the batch has samples
        ([(8, 32, 10), (8,)], 4, False),
        ([(10, 32)], 3, False),
        ([(11, 32)], 3, False),  # the rank that takes one more
        ([(16, 3, 32)], 2, False),  # images of 32 pixels
        ([(320,)], 2, False),  # flattened: a whole batch of 10, or a part of 20
        ([()], 2, False),
        ([], 2, False),
    ],
)
def test_whether_a_model_got_the_whole_batch(shapes: list[tuple[int, ...]], ranks: int, whole: bool) -> None:
    assert has_batch(shapes, 32, ranks) is whole
