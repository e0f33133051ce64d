"""What a script gives to `Run`: a wrong type is named, with what to type instead. And all of `Run` is documented."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import UsageError
from phalanx.train.data_run import DataRun
from phalanx.train.run import Run
from phalanx.train.stateful_run import StatefulRun
from phalanx.worker.process_group.group import WorkerProcessGroup


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with phalanx.init(device="cpu") as run:
        yield run


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (0.5, r"given a float, .*\n.*loss.item\(\)(.*\n)*.*run.backward\(loss\)"),
        (numpy.float32(0.5), "given a float32"),
        (numpy.zeros(1), "given a ndarray"),
        (torch.tensor(0.5), "a tensor without gradients"),
    ],
)
def test_a_loss(run: phalanx.Run, loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run.backward(loss)


def test_a_number_of_epochs(run: phalanx.Run) -> None:
    for wrong in ("2", 2.0, None, [1, 2]):
        with pytest.raises(UsageError, match=r"epochs\(\) was given .*, expected a number(.*\n)*.*run.epochs\(10\)"):
            list(run.epochs(wrong))  # type: ignore[arg-type]
    assert list(run.epochs(numpy.int64(2))) == [0, 1]


def test_the_loss_of_a_step_can_be_given_by_position(run: phalanx.Run, tmp_path: Path) -> None:
    run.folder = str(tmp_path)
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in (0.5, numpy.float32(0.25), torch.tensor(0.125)):
        run.backward(model(torch.ones(1, 1)).mean())
        run.step(opt, loss, lr=0.1)
    run.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["lr"]) for line in lines] == [(0.5, 0.1), (0.25, 0.1), (0.125, 0.1)]


def test_a_step(run: phalanx.Run) -> None:
    opt = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for wrong, message in (
        (torch.tensor(0.5), r"step\(\) was given a tensor, expected an optimizer\n.*run.step\(optimizer, loss=loss\)"),
        (0.5, "given a float, expected an optimizer"),
        (nn.Linear(1, 1), "given a Linear, expected an optimizer"),
        (torch.optim.SGD, "the class SGD, expected an optimizer"),
    ):
        with pytest.raises(UsageError, match=message):
            run.step(wrong)
    for options, message in (
        ({"clip": "1"}, "clip='1': expected the largest norm"),
        ({"clip": 0}, "clip=0"),
        ({"clip": True}, "clip=True"),
        ({"scheduler": 0.1}, "scheduler is a float"),
    ):
        with pytest.raises(UsageError, match=message):
            run.step(opt, **options)


def test_a_model(run: phalanx.Run) -> None:
    with pytest.raises(UsageError, match=r"the class Linear, expected a torch.nn.Module\n.*run.wrap\(Linear\(\)\)"):
        run.wrap(nn.Linear)
    with pytest.raises(UsageError, match=r"given an Adam, expected a torch\.nn\.Module"):
        run.wrap(torch.optim.Adam(nn.Linear(1, 1).parameters()))
    with pytest.raises(TypeError, match="find_unused_parameters"):
        run.wrap(nn.Linear(1, 1), find_unused_parameters=True)  # type: ignore[call-arg]


def names(owner: type) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def test_run_is_small_and_documented() -> None:
    """It adds at most 20 names to those of the process group, and each has a docstring that begins with its use."""
    assert len(names(Run) - names(WorkerProcessGroup)) <= 20
    source = "".join(map(inspect.getsource, (Run, DataRun, StatefulRun, WorkerProcessGroup)))
    for name in names(Run):
        text = inspect.getdoc(getattr(Run, name)) or ""
        assert f"run.{name}" in text or f"`run.{name}" in source or name == "join", name
    signatures = [inspect.signature(getattr(Run, name)) for name in ("wrap", "backward", "checkpoints")]
    kinds = {parameter.kind for signature in signatures for parameter in signature.parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
