"""Warnings about loops: each is reported once, at the line of the script."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import phalanx
from phalanx.train.script_warnings import ScriptWarnings
from tests.train.trainings_alone import Training, alone, numbers

pytestmark = [pytest.mark.xdist_group("loops"), pytest.mark.warmed]


@pytest.fixture(autouse=True)
def _inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first optimizer of a process imports torch._dynamo, which would set this permanently."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    with alone(tmp_path) as run:
        yield run


@pytest.mark.parametrize("way", ["in the step", "after the step", "after the epoch"])
def test_a_scheduler_outside_of_the_step_is_reported(run: phalanx.Run, way: str) -> None:
    training, data = Training(run), run.loader(numbers(), batch_size=4)
    decay = torch.optim.lr_scheduler.ExponentialLR(training.opt, 0.9)
    run.keep(training.model, training.opt, decay, data)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for _ in run.epochs(2):
            for x, y in data:
                run.backward(mse_loss(training.net(x), y))
                run.step(training.opt, scheduler=decay if way == "in the step" else None)
                if way == "after the step":
                    decay.step()
            if way == "after the epoch":
                decay.step()
    found = [str(warning.message) for warning in raised if "scheduler" in str(warning.message)]
    assert len(found) == (way == "after the step"), found
    assert all("run.step(opt, scheduler=scheduler, loss=loss)" in text for text in found)


def test_two_commits_of_a_batch_are_reported(run: phalanx.Run) -> None:
    training = Training(run)
    opts = [torch.optim.SGD([parameter], lr=0.1) for parameter in training.model.parameters()]
    data = run.loader(numbers(), batch_size=2)

    def epoch() -> None:
        for x, y in run.batches(data):
            run.backward(mse_loss(training.net(x), y))
            for opt in opts:
                run.step(opt)

    with pytest.warns(UserWarning, match="commit=False") as raised:
        epoch()
    assert [warning.filename for warning in raised] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in run.batches(data):
            for _ in range(3):  # any number of times, with the same one
                training.step(x, y)


def test_uneven_batches_without_run_backward_are_reported(run: phalanx.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(run)
    data = run.loader(numbers(), batch_size=4, drop_last=False)
    data.world_size = 2  # from the perspective of one of two ranks
    run._reader._placement = replace(run.group.membership.placement, world_size=2)

    def epoch() -> None:
        for x, y in run.batches(data):
            mse_loss(training.net(x), y).backward()
            run.step(training.opt)

    with pytest.warns(UserWarning, match="averages by sample") as raised:
        epoch()
    assert [warning.filename for warning in raised] == [__file__]
    run._reader._warnings = ScriptWarnings()
    run._reader._placement = replace(run._reader._placement, rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch()  # rank 0 has warned
    monkeypatch.setattr(type(data), "length", None)  # a stream in shards: that of rank 0 may be longer
    with pytest.warns(UserWarning, match="rank 1 has .* averages by sample"):
        epoch()


def test_checkpoints_without_a_folder_are_reported(run: phalanx.Run) -> None:
    run.checkpoints(every=100)
    with pytest.warns(UserWarning, match="--checkpoints DIR") as raised:
        run.keep(model=nn.Linear(1, 1))
    assert [warning.filename for warning in raised] == [__file__]


def test_a_loop_of_ones_own_with_a_wrapped_model_is_told(tmp_path: Path) -> None:
    """Not a few steps before the training, not after a committed step, and not for another model."""
    for begins_with, steps, told, other in ((0, 30, 1, False), (0, 5, 0, False), (1, 30, 0, False), (0, 30, 0, True)):
        with alone(tmp_path) as run, warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            training = Training(run)
            hook = register_optimizer_step_post_hook(lambda *_: None)  # after that of the check
            if other:
                training.opt = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.01)
            for x, y in DataLoader(numbers(begins_with)) if begins_with else ():
                training.step(x, y)
            for x, y in DataLoader(numbers(steps)):
                mse_loss(training.net(x), y).backward()
                training.opt.step()
                training.opt.zero_grad()
            hook.remove()
        texts = [str(warning.message) for warning in raised if warning.filename == __file__]
        assert ["run.step(opt, loss=loss) in place of opt.step()" in text for text in texts] == [True] * told


def test_a_warning_at_the_end_of_a_block_is_at_a_line_of_the_script() -> None:
    with pytest.warns(UserWarning, match="a text") as raised, contextlib.ExitStack() as stack:
        stack.callback(ScriptWarnings().warn, "subject", "a text")
    assert [warning.filename for warning in raised] == [__file__]


class Loaders:
    """Keeps loaders, as an object of a script may."""

    def __init__(self, loader: Any) -> None:
        self.parts = {"loaders": [loader]}

    def state_dict(self) -> dict[str, Any]:
        return self.parts["loaders"][0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["loaders"][0].load_state_dict(state)


@pytest.mark.parametrize("kept", ["model", "loader", "inside another", "no folder"])
def test_a_loader_that_is_not_kept_is_told(tmp_path: Path, kept: str) -> None:
    """Once, where something is restored after a failure; not loaders of an evaluation."""
    with alone(tmp_path) as run, warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if kept != "no folder":
            run.checkpoints(tmp_path / "kept")
        model = nn.Linear(3, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        data, test = run.loader(numbers(), batch_size=2, shuffle=True), run.loader(numbers(), batch_size=2, train=False)
        run.keep(model, opt, *{"loader": [data], "inside another": [Loaders(data)]}.get(kept, []))
        other = iter(run.loader(numbers(), batch_size=2))
        for _ in run.epochs(2):
            for x, y in run.batches(data):
                with torch.no_grad():
                    next(other, None)
                run.evaluate(test, lambda x, y: {"loss": mse_loss(model(x), y)})
                run.backward(mse_loss(model(x), y))
                run.step(opt)
    told = [f"{warning.filename}: {warning.message}" for warning in raised]
    if kept != "model":
        assert told == []
    else:
        (text,) = told
        assert text.startswith(f"{__file__}: the loader of TensorDataset was not given to run.keep")
        assert "run.keep(model, optimizer, loader)" in text
