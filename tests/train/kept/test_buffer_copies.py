"""Copies of the buffers of models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.train.kept.buffer_copies import BufferCopies
from phalanx.train.kept.kept_objects import KeptObjects
from phalanx.train.stepping.stepper import Stepper


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        for name in ("mask", "count", "queue"):
            self.register_buffer(name, torch.ones(3))
        self.register_buffer("nothing", None)
        self.register_buffer("expanded", torch.ones(1).expand(3))

    @property
    def values(self) -> dict[str, list[float]]:
        return {name: buffer.flatten().tolist() for name, buffer in self.named_buffers()}


def copies_of(net: nn.Module) -> BufferCopies:
    kept = KeptObjects(Stepper())
    kept.add([net], {})
    return BufferCopies(kept)


def forward(net: Net) -> None:
    net.norm(torch.randn(4, 2))
    net.count += 1


def test_what_a_forward_changes_is_undone() -> None:
    net = Net()
    copies = copies_of(net)
    for _ in range(3):
        copies.take()
        before = net.values
        forward(net)
        assert net.values != before
        copies.put_back()
        assert net.values == before
        forward(net)


def test_a_buffer_may_change_its_size() -> None:
    net = Net()
    copies = copies_of(net)
    copies.take()
    before = net.values
    net.queue = torch.cat([net.queue, torch.zeros(2)])
    copies.put_back()
    assert net.values == before
    net.queue = torch.zeros(5, dtype=torch.float64)
    copies.take()
    net.queue += 1
    copies.put_back()
    assert net.queue.tolist() == [0.0] * 5
    assert net.queue.dtype == torch.float64


def test_a_buffer_may_be_removed() -> None:
    net = Net()
    copies = copies_of(net)
    copies.take()
    before = net.values
    net.mask = None
    copies.put_back()
    assert net.values == before
    net.mask, net.nothing = None, torch.ones(2)
    del net.count
    copies.take()
    before = net.values
    net.norm(torch.randn(4, 2))
    net.nothing += 1
    copies.put_back()
    assert net.values == before


def test_a_buffer_that_a_forward_has_filled_is_empty_again() -> None:
    net = Net()
    copies = copies_of(net)
    copies.take()
    net.nothing = torch.ones(2)
    copies.put_back()
    assert net.nothing is None


def test_a_buffer_that_the_first_forward_has_registered_is_copied_from_then_on() -> None:
    net = Net()
    copies = copies_of(net)
    copies.take()
    net.register_buffer("cache", torch.ones(3))
    copies.settle()
    copies.take()
    before = net.values
    net.cache += 1
    copies.put_back()
    assert net.values == before


def settled(net: nn.Module) -> BufferCopies:
    """Return copies after a first step that changed nothing."""
    copies = copies_of(net)
    copies.take()
    copies.settle()
    copies.take()
    return copies


@pytest.mark.parametrize("size", [3, 1 << 15])
def test_a_buffer_that_few_forwards_change_is_put_back(size: int) -> None:
    net = Net()
    net.register_buffer("codes", torch.ones(size))
    copies = settled(net)
    for step in range(6):
        copies.take()
        before = net.values
        if step % 3 == 2:
            net.codes[1] += 1
            assert net.values != before
        copies.put_back()
        assert net.values == before
        net.codes[1] += step % 2


def test_a_large_buffer_that_few_forwards_replace_is_put_back() -> None:
    net = Net()
    net.register_buffer("codes", torch.ones(1 << 15))
    copies = settled(net)
    codes = net.codes
    net.codes = torch.zeros(1 << 15)
    copies.put_back()
    assert net.codes is codes
    net.codes = torch.zeros(1 << 15)
    copies.take()
    net.codes += 1
    copies.put_back()
    assert not net.codes.any()


def test_large_constants_are_not_copied_again() -> None:
    net = Net()
    net.register_buffer("codes", torch.ones(1 << 15))
    copies = settled(net)
    copies.take()
    net.mask.data += 1
    net.codes.data += 1  # torch does not count it
    copies.put_back()
    assert net.mask.tolist() == [1.0] * 3
    assert net.codes[0] == 2


def test_a_model_may_have_only_constants() -> None:
    net = nn.Module()
    net.register_buffer("mask", torch.ones(1 << 15))
    copies = settled(net)
    net.mask += 1
    copies.put_back()
    assert net.mask.sum() == 1 << 15


def test_buffers_that_nothing_can_write_to_stay() -> None:
    net = Net()
    with torch.inference_mode():
        net.table = nn.Buffer(torch.ones(3))
    net.graph = nn.Buffer(torch.eye(3).to_sparse())
    net.lazy = nn.LazyBatchNorm1d(affine=False)
    copies = copies_of(net)
    copies.take()
    graph = net.graph
    net.graph, net.mask = torch.zeros(3, 3).to_sparse(), torch.ones(1).expand(3)
    copies.put_back()
    assert net.graph is graph
    assert net.mask.is_contiguous()
    net.mask = torch.zeros(1).expand(3)
    copies.take()
    copies.put_back()
    assert net.mask.tolist() == [0.0] * 3
