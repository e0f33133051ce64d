"""Buffers of the last committed step, without processes: what a step has changed is undone, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.train.elastic.committed_buffers import CommittedBuffers
from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.stepping.stepper import Stepper


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise an import of the optimizer sets it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Training:
    """A model with one buffer. The methods do what `run.batches`, a forward and `run.step` do."""

    def __init__(self) -> None:
        self.stepper, self.counter, self.model = Stepper(), TrainingProgress(), nn.Linear(2, 1)
        self.model.register_buffer("count", torch.zeros(1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        kept = KeptObjects(self.stepper)
        kept.add([self.model, self.opt], {})
        kept.ready = True
        self.buffers = CommittedBuffers(kept, self.counter, self.stepper)

    @property
    def count(self) -> float:
        return float(self.model.count)

    def batch(self, *, first: bool = False) -> None:
        for call in self.stepper.hooks.before_batch:
            call(first)

    def change(self) -> None:
        self.model.count += 1

    def forward(self) -> None:
        if self.stepper.stepped:
            self.stepper.begin()
        self.change()

    def step(self, accumulate: int = 1) -> None:
        if self.stepper.step(self.opt, accumulate=accumulate).done:
            self.counter.steps += 1


def test_a_forward_is_undone() -> None:
    training = Training()
    for step in range(3):
        training.forward()
        training.buffers.put_back()
        assert training.count == step
        training.forward()
        training.step()
        training.buffers.put_back()
        assert training.count == step + 1


def test_what_comes_before_the_first_forward_of_a_batch_is_undone_too() -> None:
    """Such as a forward without gradients, or of a model that is not wrapped."""
    training = Training()
    for _ in range(2):
        training.batch()
        training.change()
        training.forward()
        training.step()
    training.change()  # by the script, after the step: it is not repeated
    training.batch()
    training.change()
    training.forward()
    training.buffers.put_back()
    assert training.count == 5


def test_what_the_end_of_an_epoch_has_changed_is_undone_until_the_next_one_begins() -> None:
    training = Training()
    training.batch(first=True)
    training.forward()
    training.step()
    training.batch()
    training.change()
    training.buffers.put_back()
    assert training.count == 1
    training.change()
    training.batch(first=True)
    training.forward()
    training.buffers.put_back()
    assert training.count == 2


def test_a_window_of_micro_batches_is_undone_as_a_whole() -> None:
    training = Training()
    for first in (True, False, False, True):  # an epoch may end within it, if its end is not known
        training.batch(first=first)
        training.forward()
        training.step(accumulate=5)
    training.buffers.put_back()
    assert training.count == 0


def test_another_epoch_that_begins_within_a_step_changes_nothing() -> None:
    training = Training()
    training.batch(first=True)
    training.forward()
    training.batch(first=True)  # of other data
    training.buffers.put_back()
    assert training.count == 0
