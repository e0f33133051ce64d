"""`run.keep` and `run.state`: objects with and without names, plain values, and rejected types."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import CheckpointError, OptionError, UsageError
from phalanx.train.checkpoint.format.plain import packed, unpacked
from phalanx.train.kept.kept_objects import divided
from phalanx.train.kept.kept_values import KeptValues

VALUES: dict[str, Any] = {
    "number": 3,
    "big": 2**80,
    "accuracy": 0.93,
    "worst": -math.inf,
    "name": "a",
    "nothing": None,
    "flag": True,
    "raw": b"\0\xff",
    "history": [0.1, [1, "x"], (2, None)],
    "table": {"lr": 0.1, 3: {"deep": []}},
}


@pytest.fixture(autouse=True)
def _inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first optimizer of a process imports torch._dynamo, which would set this permanently."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def through_json(values: KeptValues) -> KeptValues:
    """Convert like a checkpoint, without separate tensors."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(packed(values.state_dict(), "values", tensors))
    assert not tensors
    fresh = KeptValues()
    fresh.load_state_dict(unpacked(json.loads(text), tensors))
    return fresh


def test_values_come_back_as_they_were() -> None:
    values = KeptValues()
    values.update(VALUES)
    assert dict(through_json(values)) == VALUES


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.5),
        torch.arange(6).reshape(2, 3),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.ones(2, 2, requires_grad=True).t() * 2,
    ],
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    values = KeptValues()
    values["it"] = [tensor]
    (back,) = through_json(values)["it"]
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(back, tensor.detach())


def test_a_tensor_that_does_not_fit_its_bytes_is_refused() -> None:
    values = KeptValues()
    for parts in (["float32", [1 << 40], b""], ["float32", [3], b"1234"], ["nothing", [1], b"1234"], "x"):
        with pytest.raises(CheckpointError):
            values.load_state_dict({"it": {"$kept tensor": parts}})


def test_numbers_of_numpy_are_numbers() -> None:
    values = KeptValues()
    values["it"] = numpy.float32(0.5)
    assert type(values["it"]) is float


class Box:
    """Neither a value nor an object with a state."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Box(), r"it is a .*Box, which cannot be kept\n.*number.*\n.*state_dict"),
        (numpy.zeros(3), "torch.from_numpy"),
        ([1, {"a": Box()}], r"it\[1\]\['a'\] is a .*Box"),
        ({Box(): 1}, "has the key"),
        (nn.Linear, "the class Linear, not an object"),
        (torch.zeros(1 << 19), r"2,097,152 bytes: .*\n.*register_buffer"),
        (torch.zeros(2, device="meta"), "cannot be kept"),
        (torch.zeros(2, 2).to_sparse(), "cannot be kept"),
        ({1, 2}, "a set, which cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_refused_when_it_is_set(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KeptValues()["it"] = value


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="must not contain itself"):
        KeptValues()["it"] = value


def test_a_name_that_is_missing_says_which_there_are() -> None:
    values = KeptValues()
    values["best"] = 1
    with pytest.raises(KeyError, match="it has: best"):
        values["bets"]
    assert values.get("bets", 0) == 0


def test_what_is_repeated_after_a_failure_is_reset() -> None:
    """The values of the last committed step are sent to other ranks, later ones only if they are not set again."""
    values = KeptValues()
    values.update(count=0, history=[])
    offered = values.committed
    values.commit(stepped=True)
    values["count"] += 1  # after the step, where the script does not return to
    assert offered.state_dict() == {"count": 0, "history": []}
    values.commit_after_step()  # the next batch is requested
    assert offered.state_dict() == {"count": 1, "history": []}
    values["count"] += 1  # before the step
    values["history"].append(0.5)
    values.commit_after_step()  # an evaluation, or a micro-batch: still no step
    assert offered.state_dict() == {"count": 1, "history": []}
    values.commit(stepped=True)
    assert offered.state_dict() == {"count": 2, "history": [0.5]}


# -- run.keep


def test_names_of_objects_that_have_none() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    objects, values = divided([model, opt, rate, other], {"teacher": nn.Linear(1, 1), "best": 0.0})
    assert list(objects) == ["model", "optimizer", "scheduler", "model2", "teacher"]
    assert values == {"best": 0.0}


@pytest.mark.parametrize(
    ("unnamed", "named", "message"),
    [
        ([0.93], {}, r"a value needs a name: run.keep\(name=0.93\)"),
        ([Box()], {}, "which cannot be kept"),
        ([nn.Linear], {}, r"the class Linear, not an object\n.*Linear\(…\)"),
        ([], {"data": DataLoader([1])}, r"data is a .*DataLoader.*(\n.*)*run.loader\(data\)"),
        ([], {"folder": "x"}, r"run.checkpoints\(folder='x'\), before run.keep"),
        ([], {"every": 100}, r"run.checkpoints\(every=100\)"),
    ],
)
def test_what_keep_refuses(unnamed: list[object], named: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divided(unnamed, named)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[phalanx.Run]:
    with alone(tmp_path) as run:
        yield run


def alone(folder: Path) -> phalanx.Run:
    run = phalanx.Run(phalanx.init(device="cpu"))
    run.group.folder = str(folder)
    return run


def test_a_name_is_an_object_or_a_value(run: phalanx.Run) -> None:
    run.keep(model=nn.Linear(1, 1), best=0.0)
    run.keep(best=0.93)  # a value, at any time
    assert run.state["best"] == 0.93
    with pytest.raises(UsageError, match='"model" is the name of an object'):
        run.keep(model=1)
    with pytest.raises(UsageError, match="nothing to keep"):
        run.keep()


def test_options_of_checkpoints_are_checked_at_once(run: phalanx.Run) -> None:
    for options in ({"every": "soon"}, {"keep_last": 0}, {"keep_best": 0.93}, {"mode": "best"}, {"metric": 3}):
        with pytest.raises(OptionError):
            run.checkpoints(**options)
    with pytest.raises(OptionError, match='metric="accuracy": is the highest value the best'):
        run.checkpoints(keep_best=1, metric="accuracy")
    run.checkpoints(keep_best=1, metric="val_loss")
    with pytest.raises(UsageError, match="expected a path"):
        run.checkpoints(500)  # type: ignore[arg-type]
    run.keep(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"run.checkpoints\(…\) before run.keep"):
        run.checkpoints("kept")
    with pytest.raises(UsageError, match=r'run.checkpoints\("FOLDER"\) before'):
        run.save()


def train(folder: Path, epochs: int, accuracies: list[float]) -> tuple[dict[str, Any], list[int]]:
    """Return the values and the steps of the checkpoints."""
    with alone(folder) as run:
        model = nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.loader(TensorDataset(torch.ones(8, 2)), batch_size=2)
        run.checkpoints(folder / "kept", every=1000, keep_last=1, keep_best=1, metric="accuracy", mode="max")
        run.keep(model, opt, data, best=0.0, count=0)
        net = run.wrap(model)
        for epoch in run.epochs(epochs):
            for (x,) in run.batches(data):
                run.backward(net(x).mean())
                run.step(opt)
            run.log(accuracy=accuracies[epoch])
            run.state["best"] = max(run.state["best"], accuracies[epoch])
            run.state["count"] += 1
        run._finish()
        found = dict(run.state)
    return found, sorted(int(path.name[5:17]) for path in (folder / "kept").glob("step-*"))


def test_the_best_by_an_evaluation_is_kept_and_values_are_resumed(tmp_path: Path) -> None:
    """Step 8 has the best accuracy, and was saved at the end of its epoch. The end of an epoch does not count twice."""
    assert train(tmp_path, 3, [0.5, 0.9, 0.7]) == ({"best": 0.9, "count": 3}, [8, 12])
    assert train(tmp_path, 5, [0.5, 0.9, 0.7, 0.8, 0.95]) == ({"best": 0.95, "count": 5}, [20])
    lines = [json.loads(line) for line in (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["accuracy"]) for line in lines] == [
        (4, 0.5),
        (8, 0.9),
        (12, 0.7),
        (16, 0.8),
        (20, 0.95),
    ]


def test_a_default_before_the_loop_does_not_replace_what_was_restored(tmp_path: Path) -> None:
    """In any call of `run.keep`; in the loop, it is a new value."""

    def train(epochs: int) -> list[dict[str, Any]]:
        seen = []
        with alone(tmp_path) as run:
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            run.checkpoints(tmp_path / "kept", every=1000)
            run.keep(best=0.0)
            run.keep(model, opt)
            run.keep(count=0, added=epochs)
            seen.append(dict(run.state))
            for epoch in run.epochs(epochs):
                run.keep(count=run.state["count"] + 1, best=epoch / 10)
                run.backward(model(torch.ones(1, 2)).mean())
                run.step(opt)
            run._finish()
            return [*seen, dict(run.state)]

    assert train(2) == [{"best": 0.0, "count": 0, "added": 2}, {"best": 0.1, "count": 2, "added": 2}]
    before, after = train(4)
    assert before == {"best": 0.1, "count": 2, "added": 2}
    assert (after["best"], after["added"]) == (0.3, 2)
