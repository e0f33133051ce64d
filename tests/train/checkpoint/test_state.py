"""The state of models, optimizers and schedulers: packed, restored, and rejected."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler as schedulers

from phalanx.train.checkpoint import CheckpointError, Checkpoints
from phalanx.train.checkpoint.format.plain import packed, unpacked
from tests.train.checkpoint.folders import steps
from tests.train.checkpoint.trainings import Odd, same


def test_optimizer_state_follows_parameters_in_another_order(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    opt = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    turned = torch.optim.Adam(reversed(list(model.parameters())))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "opt": opt})
        checkpoints.wait()
        checkpoints.load({"model": model, "opt": turned})
    for parameter in model.parameters():
        assert torch.equal(turned.state[parameter]["exp_avg"], opt.state[parameter]["exp_avg"])


def test_an_expanded_buffer_is_restored(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("mask", torch.full((1,), value).expand(3))
        return model

    model, restored = make(2.0), make(0.0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model})
        checkpoints.wait()
        checkpoints.load({"model": restored})
    assert restored.mask.tolist() == [2.0] * 3


def test_tensor_names_omit_wrappers(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    around = nn.DataParallel(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.Linear(3, 1)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": around})
        checkpoints.wait()
        checkpoints.load({"model": plain})
    assert same([*plain.parameters()], [*around.parameters()])
    with safe_open(tmp_path / "step-000000000001" / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}
        assert torch.equal(file.get_tensor("model.0.weight"), plain[0].weight)


def model_and_optimizer(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    more = {"momentum": 0.9} if name == "SGD" else {"fused": True} if name == "AdamW" else {}
    return model, getattr(torch.optim, name)(
        model.parameters(), lr=torch.tensor(0.01) if name == "Adam" else 0.01, **more
    )


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    def loss() -> torch.Tensor:
        opt.zero_grad()
        found = model(torch.linspace(-1, 1, 12).view(4, 3)).square().mean()
        found.backward()
        return found

    for _ in range(steps):
        opt.step(loss)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "ASGD", "Rprop", "Adafactor", "LBFGS"])
def test_optimizer_state_is_restored(tmp_path: Path, name: str) -> None:
    """Includes a learning rate in a tensor, state in lists, and state of the first parameter alone."""
    model, opt = model_and_optimizer(name, 1)
    train(model, opt, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": model, "opt": opt})
    train(model, opt, 3)
    other, again = model_and_optimizer(name, 2)
    Checkpoints(tmp_path).load({"model": other, "opt": again})
    train(other, again, 3)
    assert same([*other.parameters()], [*model.parameters()])


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=9),
        lambda opt: schedulers.CyclicLR(opt, 0.1, 0.2, step_size_up=2),
        lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step)),
        lambda opt: schedulers.SequentialLR(
            opt, [schedulers.ConstantLR(opt), schedulers.CosineAnnealingLR(opt, 5)], milestones=[2]
        ),
        lambda opt: schedulers.ReduceLROnPlateau(opt, patience=0),
    ],
)
def test_scheduler_state_is_restored(tmp_path: Path, make: Any) -> None:
    def rates(opt: torch.optim.Optimizer, schedule: Any) -> list[float]:
        found = []
        for _ in range(3):
            opt.step()
            schedule.step(*([1.0] if isinstance(schedule, schedulers.ReduceLROnPlateau) else []))
            found.append(opt.param_groups[0]["lr"])
        return found

    model, opt = model_and_optimizer("SGD", 1)
    schedule = make(opt)
    rates(opt, schedule)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": model, "opt": opt, "schedule": schedule})
    _, again = model_and_optimizer("SGD", 1)
    other = make(again)
    Checkpoints(tmp_path).load({"model": model, "schedule": other})
    with torch.no_grad():
        again.param_groups[0]["lr"] = opt.param_groups[0]["lr"]
    assert rates(again, other) == rates(opt, schedule)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "opt": opt})
        checkpoints.wait()
        other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(1, 1))
        before = [parameter.clone() for parameter in other.parameters()]
        with pytest.raises(CheckpointError, match="does not fit the model") as caught:
            checkpoints.load({"model": other})
        assert caught.value.details == (
            "the model has model.3.weight, the checkpoint does not",
            "the model has model.3.bias, the checkpoint does not",
            "the checkpoint has model.1.bias, the model does not",
            "model.1.weight is (5, 3) in the model, (4, 3) in the checkpoint",
        )
        assert same(before, [*other.parameters()])
        with pytest.raises(CheckpointError, match="does not fit the model") as caught:
            checkpoints.load({"model": Odd()})
        assert caught.value.details[-1].startswith("and ")
        with pytest.raises(CheckpointError, match='the checkpoint has no "modl"'):
            checkpoints.load({"modl": model})
        with pytest.raises(CheckpointError, match="does not fit the optimizer"):
            checkpoints.load({"model": model, "opt": torch.optim.SGD(model[0].parameters(), lr=0.1)})


@pytest.mark.parametrize(
    ("kept", "extra", "message"),
    [
        ({"opt": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, {}, "for a model that is not kept"),
        ({"thing": 3}, {}, '"thing" is a int, which has no state_dict'),
        ({}, {"file": object()}, "extra.file is a builtins.object, which cannot be saved"),
        ({}, {"tensor": torch.ones(1)}, "extra holds tensors: extra.tensor"),
        (
            {"model": nn.ParameterList([torch.ones(2, 2).to_sparse()])},
            {},
            "model.0 is a tensor that cannot be saved: torch.sp",
        ),
        (
            {"model": nn.Linear(2, 2, device="meta")},
            {},
            "model.weight is a tensor that cannot be saved: on the meta device",
        ),
    ],
)
def test_unsupported_objects_are_refused(
    tmp_path: Path, kept: dict[str, object], extra: dict[str, object], message: str
) -> None:
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, kept, extra)
    assert steps(tmp_path) == []


class OnlyExtraState(nn.Module):
    """A module whose only state is extra state."""

    def get_extra_state(self) -> object:
        return "words"

    def set_extra_state(self, state: object) -> None:
        pass


def test_missing_extra_state_is_named(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nn.ReLU()})
        with pytest.raises(CheckpointError, match="does not fit the model") as caught:
            checkpoints.load({"model": OnlyExtraState()})
    assert caught.value.details == ("the model has model._extra_state, the checkpoint does not",)


PLAIN = [
    *(None, True, 0, -5, 2**63, -(2**80), 1.5, 1e300, "text", "", b"\x00\xff"),
    *([], [1, [2]], (), (1, (2, "x")), {}, {"a": {"b": [1]}}, {1: "int", "1": "str"}, {(1, 2): 3}, {"$tuple": [1]}),
    *({1, 2}, Counter({3: 1, 5: 2}), torch.float16, torch.device("cpu"), math.inf, -math.inf),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value: object) -> None:
    tensors: dict[str, torch.Tensor] = {}
    back = unpacked(json.loads(json.dumps(packed(value, "x", tensors), allow_nan=False)), tensors)
    assert back == value
    assert type(back) is (dict if isinstance(value, Counter) else type(value))
    assert not tensors


def test_plain_values_with_tensors() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), {3: torch.zeros(1)}], "nan": math.nan}
    text = json.dumps(packed(value, "x", tensors))
    assert set(tensors) == {"x.a.0", "x.a.1.3"}
    back = unpacked(json.loads(text), tensors)
    assert torch.equal(back["a"][0], torch.ones(2))
    assert torch.equal(back["a"][1][3], torch.zeros(1))
    assert math.isnan(back["nan"])
    tensors.clear()
    value = {1: torch.ones(1), "1": torch.zeros(1), "a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    back = unpacked(packed(value, "x", tensors), tensors)
    assert [int(back[key].sum()) for key in (1, "1", "a.b")] == [1, 0, 2]
    assert int(back["a"]["b"].sum()) == 0
