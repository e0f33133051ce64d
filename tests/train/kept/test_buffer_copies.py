"""Copies of the buffers of models."""

from __future__ import annotations

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
    net.mask, net.nothing = None, torch.ones(2)
    copies.put_back()
    assert net.values == {**before, "nothing": [1.0] * 2}
    net.mask = None
    del net.count
    copies.take()
    before = net.values
    net.norm(torch.randn(4, 2))
    net.nothing += 1
    copies.put_back()
    assert net.values == before


def test_constants_are_not_copied_again() -> None:
    """Statistics of a normalization are: its layer may be frozen, or not be used, in the first step."""
    net = Net()
    copies = copies_of(net)
    copies.take()
    net.count += 1
    copies.drop_constants()
    copies.take()
    before = net.values
    forward(net)
    net.mask += 1
    copies.put_back()
    assert net.values == {**before, "mask": [2.0] * 3}


def test_a_model_may_have_only_constants() -> None:
    net = nn.Module()
    net.register_buffer("mask", torch.ones(3))
    copies = copies_of(net)
    copies.take()
    copies.drop_constants()
    copies.take()
    net.mask += 1
    copies.put_back()
    assert net.mask.tolist() == [2.0] * 3
