"""What the checks of a script conclude from the tensors that its model gets."""

from __future__ import annotations

import pytest
import torch

from phalanx.train.misuse.samples import has_batch, shapes


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
        ([(320,)], 2, False),  # a flattened copy: a whole batch of 10, or a part of 20
        ([()], 2, False),
        ([], 2, False),
    ],
)
def test_whether_a_model_got_the_whole_batch(shapes: list[tuple[int, ...]], ranks: int, whole: bool) -> None:
    assert has_batch(shapes, 32, ranks) is whole


def test_a_view_of_a_whole_batch_is_one_and_a_view_of_a_part_is_none() -> None:
    batch = torch.zeros(32, 10)
    whole = [batch.view(-1), batch.flatten(), batch.view(64, 5), batch.view(16, 20), batch.unsqueeze(0), batch.t()]
    part = [batch[:16], batch[16:].flatten(), batch.view(4, 8, 10)[1].reshape(-1), batch.chunk(2)[1].view(-1, 2)]
    copied = [batch.t().reshape(-1), batch[:16].clone().view(-1), torch.zeros(320)]
    assert [has_batch(shapes(each), 32, 2) for each in whole] == [True] * len(whole)
    assert [has_batch(shapes(each), 32, ranks) for each in part for ranks in (2, 4)] == [False] * 2 * len(part)
    assert [has_batch(shapes(each), 32, 2) for each in copied] == [False] * len(copied)
