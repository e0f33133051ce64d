"""`run.wrap`: what wrapped models do on two real ranks, and alone."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.errors import OptionError, UsageError
from phalanx.train.checkpoint.peers import SingleRank
from phalanx.train.model.compression import PowerSGD
from phalanx.train.model.replaced_parameters import ReplacedParameters
from phalanx.train.model.sharding import units
from phalanx.train.model.wrap import wrap
from phalanx.train.stepping.stepper import Stepper
from tests.kit.cli import phalanx

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "behaviours.py")
pytestmark = [pytest.mark.xdist_group("wrap"), pytest.mark.warmed]  # one launch serves them all


@functools.cache
def seen() -> list[dict[str, Any]]:
    """Return the observations of every rank, from one launch for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        done = phalanx("run", "-g", "2", "--cpu", SCRIPT, folder, env={"TORCHINDUCTOR_CACHE_DIR": None})
        assert done.code == 0, done.out + done.err
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def agreed(*path: str) -> dict[str, Any]:
    """Return the observations of rank 0, if both ended with the same weights."""
    first, second = (functools.reduce(lambda found, key: found[key], path, rank) for rank in seen())
    assert first["weights"] == second["weights"]
    return dict(first)


@pytest.fixture(autouse=True)
def _inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first optimizer of a process imports torch._dynamo, which would set this permanently."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


# -- two ranks


@pytest.mark.parametrize(("accumulate", "updates"), [(1, range(12)), (4, (3, 7, 11)), (5, (4, 9, 11))])
def test_ranks_talk_once_an_update(accumulate: int, updates: range | tuple[int, ...]) -> None:
    found = agreed("reductions", str(accumulate))
    assert [number for number, done in enumerate(found["done"]) if done] == list(updates)
    assert found["sent"] == len(updates)


def test_a_window_is_learned_from_the_step() -> None:
    found = agreed("learned")
    # 3, 3, then 4 shortened to 2 after its first: that one ends with the first backward that was synchronised.
    assert [number for number, done in enumerate(found["done"]) if done] == [2, 5, 8, 10]
    # The first backward was synchronised before anything was known.
    assert found["sent"] == 5


@pytest.mark.parametrize(
    "path",
    [
        ("static_graph",),
        ("find_unused",),
        ("compressed", "fp16"),
        ("compressed", "bf16"),
        ("compressed", "powersgd"),
        ("bf16", "ddp"),
        ("bf16", "fsdp"),
        ("fp16", "ddp"),
        ("fp16", "fsdp"),
    ],
    ids=" ".join,
)
def test_it_trains_and_ranks_agree(path: tuple[str, ...]) -> None:
    found = agreed(*path)
    assert found["last"] < 0.8 * found["first"]


def test_a_static_graph_changes_nothing_but_time() -> None:
    found = agreed("static_graph")
    assert found["weights"] == pytest.approx(found["plain"], rel=1e-5)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_bf16_is_inside_the_forward_only(how: str) -> None:
    found = agreed("bf16", how)
    assert found["inside"] == ["torch.bfloat16"]
    assert (found["output"], found["beside"], found["parameter"]) == (
        "torch.float32",
        "torch.bfloat16",
        "torch.float32",
    )


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_an_overflow_of_one_rank_is_a_step_that_all_skip(how: str) -> None:
    for rank in seen():
        assert rank["fp16"][how]["overflow"] == [False, True, True, 2.0]
        assert not any(rank["fp16"][how]["skipped"])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_loss_that_was_not_scaled_is_reported(how: str) -> None:
    assert "fix: run.backward(loss)" in seen()[0]["fp16"][how]["forgotten"]


def test_an_optimizer_made_before_fsdp_keeps_its_state() -> None:
    for rank in seen():
        assert rank["made_before"]["fsdp"] == pytest.approx(rank["made_before"]["ddp"], rel=1e-4)
        # The parameters before sharding are freed, otherwise sharding would save nothing.
        assert not rank["made_before"]["fsdp holds the whole"]
        assert rank["made_before"]["ddp holds the whole"]


def test_rank_0_has_the_model() -> None:
    first, second = (rank["seeds"] for rank in seen())
    assert first == second
    assert first["ddp"] == pytest.approx(first["fsdp"])
    assert first["ddp"][-1] == 0.0


def test_tied_parameters_stay_tied() -> None:
    for rank in seen():
        assert rank["tied"]["fsdp is tied"]
        assert rank["tied"]["fsdp"] == pytest.approx(rank["tied"]["ddp"], rel=1e-4)


def test_a_rank_may_evaluate_alone() -> None:
    assert [rank["alone"] for rank in seen()] == [{"broadcast": True, "training": True}] * 2


def test_fsdp_has_its_shards_back_after_an_evaluation() -> None:
    assert [rank["evaluated"] for rank in seen()] == [[True] * 6] * 2


def test_constants_are_not_broadcast_in_every_step() -> None:
    assert seen()[0]["constants"] == {"broadcast": False}


def test_a_rank_without_samples_takes_part() -> None:
    for rank in seen():
        assert rank["empty"]["ours"] == pytest.approx(rank["empty"]["plain"], rel=1e-5)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("direct", "ddp(x) in place of model(x)"),
        ("foreign", "no parameter of a wrapped model"),
        ("sync_batchnorm", "torch has SyncBatchNorm for GPUs only"),
        ("dp", "these are 2 processes"),
    ],
)
def test_a_mistake_is_reported(mistake: str, text: str) -> None:
    assert text in seen()[1]["mistakes"][mistake]


def test_the_group_is_let_go_while_everything_is_still_held() -> None:
    assert [rank["closed"] for rank in seen()] == [[True, True, [8, 2]]] * 2


# -- one process


class Nobody(SingleRank):
    device = torch.device("cpu")

    def before_close(self, call: Callable[[], object]) -> None:
        raise AssertionError("there is nothing to close")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.width = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


@pytest.mark.parametrize("how", ["ddp", "dp", "fsdp"])
def test_a_wrapped_model_has_the_attributes_of_the_model(how: str) -> None:
    model = Net()
    wrapped = wrap(model, how, group=Nobody())
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert [name for name, _ in wrapped.named_parameters()] == ["layer.weight", "layer.bias"]
    assert next(wrapped.parameters()) is model.layer.weight
    assert (wrapped.width, wrapped.layer) == (3, model.layer)
    assert wrapped.twice(torch.zeros(1, 3)).shape == (1, 2)
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing
    wrapped.eval()
    assert (wrapped.training, model.training, model.layer.training) == (False, False, False)
    wrapped.load_state_dict({"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)})
    assert wrapped(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert "Linear" in repr(wrapped)


def test_a_name_that_the_model_lacks_is_one_error() -> None:
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'paramters'") as raised:
        _ = wrap(Net(), group=Nobody()).paramters
    assert raised.value.__context__ is None


def test_two_optimizers_step_after_one_backward() -> None:
    model, x = Net(), torch.ones(4, 3)
    plain = copy.deepcopy(model)
    wrapped = wrap(model, group=Nobody(), accumulate=2)
    opts = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for number in range(4):
        wrapped(x).square().mean().backward()
        assert [wrapped.step(opt).done for opt in opts] == [number % 2 == 1] * 2
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        plain(x).square().mean().backward()
        opt.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_each_model_has_its_own_window() -> None:
    stepper = Stepper()
    first, second = Net(), Net()
    wrapped = [
        wrap(first, group=Nobody(), stepper=stepper, accumulate=2),
        wrap(second, group=Nobody(), stepper=stepper),
    ]
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    done = []
    for _ in range(4):
        sum(net(torch.ones(1, 3)).sum() for net in wrapped).backward()
        done.append([stepper.step(opt).done for opt in opts])
    assert done == [[False, True], [True, True]] * 2


def test_two_optimizers_unscale_by_the_scale_of_their_backward() -> None:
    """One overflows, which reduces the scale, but not before the other has used it."""
    model = Net()
    wrapped = wrap(model, group=Nobody(), precision="fp16")
    wrapped.scaler.load_state_dict({**wrapped.scaler.state_dict(), "scale": 8.0})
    opts = [torch.optim.SGD([parameter], lr=1.0) for parameter in model.parameters()]
    before = model.layer.bias.detach().clone()
    wrapped(torch.ones(1, 3))
    wrapped.backward(model.layer.weight.sum() * 1e38 + model.layer.bias.sum())
    assert [wrapped.step(opt).skipped for opt in opts] == [True, False]
    torch.testing.assert_close(model.layer.bias.detach(), before - 1.0)
    assert wrapped.stepper.state_dict()["scaler"]["scale"] == 4.0


def test_a_copy_is_one_of_the_model() -> None:
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(wrap(model, group=Nobody()))
    assert type(average.module) is Net
    assert average.module.layer.weight is not model.layer.weight


def test_what_has_taken_the_place_of_a_parameter_is_left_alone() -> None:
    """By identity, not by its address in memory, which may be reused."""
    gone, now, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    replaced = ReplacedParameters()
    replaced._after = {id(other): (weakref.ref(gone), now)}
    opt = torch.optim.SGD([other], lr=0.1)
    replaced.adopt(opt)
    assert opt.param_groups[0]["params"][0] is other


def test_a_scheduler_goes_with_updates() -> None:
    model = Net()
    wrapped = wrap(model, group=Nobody(), accumulate=2)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    rates = []
    for _ in range(4):
        wrapped(torch.ones(1, 3)).sum().backward()
        wrapped.step(opt, scheduler=scheduler)
        rates.append(opt.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


def test_the_scale_of_fp16_is_kept() -> None:
    wrapped = wrap(Net(), group=Nobody(), precision="fp16")
    wrapped.scaler.load_state_dict({**wrapped.scaler.state_dict(), "scale": 32.0})
    kept = wrapped.stepper.state_dict()
    early = Stepper()
    early.load_state_dict(kept)  # like a script that restores before it wraps
    assert early.state_dict() == kept
    assert wrap(Net(), group=Nobody(), stepper=early, precision="fp16").scaler.get_scale() == 32.0
    late = wrap(Net(), group=Nobody(), precision="fp16")
    late.stepper.load_state_dict(kept)
    assert late.scaler.get_scale() == 32.0
    Stepper().load_state_dict(wrap(Net(), group=Nobody()).stepper.state_dict())


def test_each_window_is_measured_by_itself() -> None:
    """A resumed model has the same values as one that was not interrupted: they do not depend on earlier windows."""
    model, x = Net(), torch.randn(7, 3)
    fresh = copy.deepcopy(model)
    went_on, resumed = wrap(model, group=Nobody()), wrap(fresh, group=Nobody())
    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, fresh)]
    went_on.weigh(went_on(x).square().mean() * 0.0, 3, 3).backward()
    went_on.step(opts[0])
    for wrapped, opt in zip((went_on, resumed), opts, strict=True):
        wrapped.weigh(wrapped(x).square().mean(), 7, 7).backward()
        wrapped.step(opt)
    assert torch.equal(model.layer.weight, fresh.layer.weight)


def test_a_group_added_later_is_clipped_too() -> None:
    model = Net()
    wrapped = wrap(model, group=Nobody())
    opt = torch.optim.SGD([model.layer.weight], lr=0.0)
    norms = []
    for _ in range(2):
        wrapped(torch.ones(1, 3)).sum().backward()
        norms.append(wrapped.step(opt, clip=1.0).norm.item() ** 2)
        model.zero_grad()
        if len(opt.param_groups) == 1:
            opt.add_param_group({"params": [model.layer.bias]})
    assert norms == pytest.approx([6.0, 8.0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"how": "dpp"}, "known are ddp, dp, fsdp, hsdp"),
        ({"precision": "fp8"}, "known: None, bf16, fp16"),
        ({"compress": "zip"}, "known: None, fp16, bf16, powersgd"),
        ({"how": "fsdp", "compress": "bf16"}, 'compress is for "ddp"'),
        ({"how": "ddp", "shard": nn.Linear}, 'shard is for "fsdp" and "hsdp"'),
        ({"how": "fsdp", "shards": 2}, 'shards is for "hsdp", not for "fsdp"'),
        ({"how": "hsdp", "shards": 3}, "ranks cannot be divided into replicas of 3"),
        ({"static_graph": True, "find_unused": True}, "leave one of them out"),
        ({"accumulate": 0}, "expected 1 or more"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as raised:
        wrap(Net(), group=Nobody(), **options)
    assert text in str(raised.value)


def test_more_that_cannot_be() -> None:
    with pytest.raises(OptionError, match="wrapped already"):
        wrap(wrap(Net(), group=Nobody()), group=Nobody())
    with pytest.raises(OptionError, match="meta device"):
        wrap(Net().to("meta"), group=Nobody())
    with pytest.raises(OptionError, match="start 2 or more"):
        PowerSGD(start=1)
    with pytest.raises(UsageError, match="expected 0 <= count"):
        wrap(Net(), group=Nobody()).weigh(torch.ones(()), 5, 4)


def test_units_of_a_model() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(2, 2), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Model(nn.Module):
        def __init__(self, tie: bool = False) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Linear(2, 2), nn.ModuleList([Block(), Block()])
            self.act, self.head = nn.ReLU(), nn.Linear(2, 2)
            if tie:
                self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Model()
    first, second = model.blocks
    assert units(model, None) == [model.head, second, first, model.embed]
    assert units(model, Block) == [second, first]
    assert units(model, (Block, nn.Linear)) == [model.head, second.linear, second, first.linear, first, model.embed]
    assert units(model, lambda module: module is first) == [first]
    tied = Model(tie=True)
    assert units(tied, None) == list(reversed(tied.blocks))
    with pytest.raises(OptionError, match="names no part of Model"):
        units(model, nn.Conv2d)
