"""`run.log` at any time, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.errors import UsageError


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with phalanx.Run(phalanx.init(device="cpu")) as run:
        run.group.folder = str(tmp_path)
        yield run


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name not in ("time", "epoch")} for line in found]


def test_at_any_time(run: phalanx.Run, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run.log(begun=1)
    for _ in range(2):
        run.backward(model(torch.ones(1, 1)).mean())
        run.step(opt, loss=torch.tensor(0.5))
        run.log({"val/accuracy": 0.25}, lr=0.1)
    run.log()
    run.group.close()
    assert lines(tmp_path) == [
        {"step": 0, "begun": 1.0},
        {"step": 1, "loss": 0.5},
        {"step": 1, "val/accuracy": 0.25, "lr": 0.1},
        {"step": 2, "loss": 0.5},
        {"step": 2, "val/accuracy": 0.25, "lr": 0.1},
    ]


def test_without_a_step_too(run: phalanx.Run, tmp_path: Path) -> None:
    run.log(accuracy=0.5)
    run.group.close()
    assert lines(tmp_path) == [{"step": 0, "accuracy": 0.5}]


def test_metrics_on_a_gpu_do_not_wait_for_the_end_of_an_evaluation(
    run: phalanx.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[int] = []
    monkeypatch.setattr(run._reporter, "settle", lambda: settled.append(run.steps))
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.zeros(10, 1))
    train, test = run.loader(samples, batch_size=2), run.loader(samples, batch_size=5, train=False)
    run.keep(model, opt, train)
    for (x,) in run.batches(train):
        run.backward(model(x).mean())
        run.step(opt)
    assert settled == [0, 5], "before the first step, and after the last one"
    run.evaluate(test, lambda x: {"mean": x.mean()})
    assert settled == [0, 5, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("text", r"a str, expected metrics by name\n.*run.print"),
        ({1: 2}, "expected metrics by name"),
        ({"name": "text"}, "the metric name is 'text', not one number"),
        ({"step": 1}, 'cannot be named "step"'),
        ({"rank": 1}, 'cannot be named "rank"'),
    ],
)
def test_invalid_metrics_are_refused(run: phalanx.Run, values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run.log(values)


# -- trackers
