"""Checkpoints of one process: what comes back, what is refused, what damage does."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from torch.optim import lr_scheduler as schedulers

from phalanx.errors import OptionError
from phalanx.train.checkpoint import CheckpointError, Checkpoints, Info, export, loading, randomness
from phalanx.train.checkpoint.format.folder import Folder
from phalanx.train.checkpoint.format.plain import packed, unpacked
from phalanx.train.checkpoint.retention import Retention
from phalanx.train.checkpoint.shares import share

DTYPES = (
    *(torch.float64, torch.float16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64),
)


class Odd(nn.Module):
    """Of everything that a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))
        self.across = nn.Parameter(torch.randn(4, 3).t())  # not contiguous
        self.alone = nn.Parameter(torch.randn(()))
        self.brief = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor([2**62, -1]))
        for dtype in DTYPES:
            self.register_buffer(str(dtype).removeprefix("torch."), torch.tensor([[1, 0, 1]]).to(dtype))
        self.tied = self.body[3]
        self.words = ["not", {"a": 1}, None]

    def get_extra_state(self) -> object:
        return {"words": self.words, "tensors": [torch.ones(1), (torch.zeros(2), None)]}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]
        assert torch.equal(state["tensors"][1][0], torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x) * self.alone
        return (y @ self.across.t()).sum() + self.brief.float().sum()


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Odd()
        self.opt = torch.optim.AdamW(
            [{"params": list(self.model.body.parameters())}, {"params": [self.model.across], "lr": 0.5}], lr=0.01
        )
        self.other = torch.optim.SGD([self.model.alone, self.model.brief], lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.opt, [2, 4])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @property
    def kept(self) -> dict[str, object]:
        return {
            "model": self.model,
            "opt": self.opt,
            "other": self.other,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def step(self) -> None:
        self.model(torch.randn(8, 6) * random.random()).backward()
        self.opt.step()
        self.other.step()
        self.schedule.step()
        self.opt.zero_grad()
        self.other.zero_grad()

    def values(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values() if isinstance(value, torch.Tensor)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, and for all dtypes: torch.equal does not know some."""
    raw = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def saved(folder: Path, *steps: int, **options: Any) -> nn.Linear:
    """A model whose weights are the number of the step, saved at each."""
    model = nn.Linear(32, 16)
    with Checkpoints(folder, **{"keep_last": 9, **options}) as checkpoints:
        for step in steps:
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoints.save(step, {"model": model}, metrics={"loss": abs(step - 2.5)})
    return model


def steps(folder: Path) -> list[int]:
    return [int(name[5:]) for name in sorted(os.listdir(folder)) if name.startswith("step-")]


# -- there and back


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    first = Training(1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(first.kept) is None
        for _ in range(3):
            first.step()
        assert checkpoints.save(3, first.kept, {"consumed": 24, "pair": (1, 2)}, {"loss": 0.5, "none": math.nan})
        at_save = first.values()
        for _ in range(3):
            first.step()  # while that is being written
    second = Training(2)
    second.step()
    second.model.words = []
    with Checkpoints(tmp_path) as checkpoints:
        info = checkpoints.load(second.kept)
        assert info == Info(
            3,
            f"{tmp_path}/step-000000000003",
            {"loss": 0.5, "none": None},
            1,
            info.time,
            {"consumed": 24, "pair": (1, 2)},
        )
        assert same(second.values(), at_save)
        assert second.model.words == first.model.words
    for _ in range(3):
        second.step()
    assert same(second.values(), first.values())
    assert second.schedule.state_dict() == first.schedule.state_dict()
    assert [group["lr"] for group in second.opt.param_groups] == [group["lr"] for group in first.opt.param_groups]


def test_a_save_that_is_under_way_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    want = model.weight.detach().clone()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model})
        model.weight.data.zero_()
        assert checkpoints.load({"model": model}).step == 1
    assert torch.equal(model.weight, want)


def test_random_numbers_only_if_wanted(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.wait()
        torch.manual_seed(5)
        want = torch.rand(3)
        torch.manual_seed(5)
        checkpoints.load({}, random=False)
        assert torch.equal(torch.rand(3), want)


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    training = Training(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, training.kept)
        assert training.opt.state_dict()["state"] == {}
        training.step()
        checkpoints.load(training.kept)
    assert training.opt.state_dict()["state"] == {}


def test_the_optimizer_may_have_its_parameters_in_another_order(tmp_path: Path) -> None:
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


def test_wrappers_do_not_show_in_names(tmp_path: Path) -> None:
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


def test_saves_wait_or_are_skipped(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    with Checkpoints(tmp_path / "wait", buffers=1, keep_last=99) as checkpoints:
        assert all(checkpoints.save(step, {"model": model}) for step in range(5))
    assert steps(tmp_path / "wait") == list(range(5))
    with Checkpoints(tmp_path / "skip", buffers=1, busy="skip", keep_last=99) as checkpoints:
        done = [step for step in range(30) if checkpoints.save(step, {"model": model})]
    assert steps(tmp_path / "skip") == done
    assert 0 < len(done) < 30


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    model = saved(tmp_path, 7, 8)
    assert sorted(os.listdir(tmp_path))[1:] == ["step-000000000007.2", "step-000000000008"]
    for number in (9, 10):
        os.mkdir(tmp_path / f"step-000000000007.{number}")
    assert Folder(str(tmp_path)).names()[1:3] == ["step-000000000007.10", "step-000000000007.9"]
    assert Checkpoints(tmp_path).load({"model": model}).step == 8


def made(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
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
def test_optimizers(tmp_path: Path, name: str) -> None:
    """Tensors for a learning rate, state in lists, state of the first parameter alone: as torch has them."""
    model, opt = made(name, 1)
    train(model, opt, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": model, "opt": opt})
    train(model, opt, 3)
    other, again = made(name, 2)
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
def test_schedulers(tmp_path: Path, make: Any) -> None:
    def rates(opt: torch.optim.Optimizer, schedule: Any) -> list[float]:
        found = []
        for _ in range(3):
            opt.step()
            schedule.step(*([1.0] if isinstance(schedule, schedulers.ReduceLROnPlateau) else []))
            found.append(opt.param_groups[0]["lr"])
        return found

    model, opt = made("SGD", 1)
    schedule = make(opt)
    rates(opt, schedule)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": model, "opt": opt, "schedule": schedule})
    _, again = made("SGD", 1)
    other = make(again)
    Checkpoints(tmp_path).load({"model": model, "schedule": other})
    with torch.no_grad():
        again.param_groups[0]["lr"] = opt.param_groups[0]["lr"]
    assert rates(again, other) == rates(opt, schedule)


def test_a_rank_that_was_not_there_has_numbers_of_its_own() -> None:
    own = torch.Generator()
    saved = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        own.manual_seed(seed)
        saved.append(randomness.packed(randomness.taken([own])))
    drawn = []
    for rank in (0, 1, 2, 3, 2):
        randomness.restore(json.loads(json.dumps(saved)), rank, [own])
        drawn.append((torch.rand(1).item(), random.random(), torch.rand(1, generator=own).item()))
    assert all(len(set(numbers)) == 4 for numbers in (*list(zip(*drawn, strict=True))[::2],))
    assert drawn[2] == drawn[4]
    torch.manual_seed(2)
    assert drawn[1][0] == torch.rand(1).item()


def test_the_writer_steps_back_and_nobody_else(tmp_path: Path) -> None:
    def priorities() -> list[int]:
        return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")]

    own = os.getpriority(os.PRIO_PROCESS, 0)
    before = Counter(priorities())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.wait()
        assert Counter(priorities()) - before == Counter([min(19, own + 10)])
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_memory_is_bounded(tmp_path: Path) -> None:
    """However many saves follow each other, there are as many copies as there are buffers."""
    model = nn.Linear(2048, 2048)  # 16 MiB
    process = psutil.Process()
    before = process.memory_info().rss
    most = 0
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in range(8):
            checkpoints.save(step, {"model": model})
            most = max(most, process.memory_info().rss)
    assert most - before < 44 << 20


# -- what is kept


def infos(*losses: float | None) -> list[Info]:
    return [Info(step, f"/x/step-{step:012d}", {"loss": loss}) for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("keeping", "losses", "bad", "gone"),
    [
        (Retention(2), (5, 4, 3), [], [1]),
        (Retention(2), (5, 4), [], []),
        (Retention(1), (5, 4, 3), [], [1, 2]),
        (Retention(1, 1), (5, 1, 3), [], [1]),
        (Retention(1, 2), (5, 1, 3, 9), [], [1]),
        (Retention(1, 1, mode="max"), (5, 1, 3), [], [2]),
        (Retention(1, 1), (None, math.nan, 3, 4), [], [1, 2]),
        (Retention(1, 1, "accuracy"), (1, 2, 3), [], [1, 2]),
        (Retention(1, 1), (2, 2, 9), [], [1]),  # of equals the newer
        (Retention(2), (5, 4, 3), [9, 0], [0, 1]),  # a bad one does not count, and goes when it is old
        (Retention(2), (5,), [0], []),
        (Retention(1, 1), (math.inf, 7, math.nan, 8), [], [1, 3]),  # what is no number is never the best
        (Retention(1, 1, mode="max"), (math.inf, 7, math.nan, 8), [], [1, 2, 3]),
    ],
)
def test_surplus(keeping: Retention, losses: tuple[float | None, ...], bad: list[int], gone: list[int]) -> None:
    found = keeping.surplus(infos(*losses), [f"step-{step:012d}" for step in bad])
    assert sorted(int(name[5:]) for name in found) == gone


@pytest.mark.parametrize(
    ("keeping", "losses", "bad", "gone"),
    [
        (Retention(2), (5, 4), [], [1]),
        (Retention(3), (5, 4), [], []),
        (Retention(1), (5,), [], []),  # the newest good one stays, also if the next will replace it
        (Retention(1), (5, 4), [9, 0], [0, 1]),
        (Retention(2, 1), (1, 5, 4), [], [2]),
    ],
)
def test_replaceable(keeping: Retention, losses: tuple[float, ...], bad: list[int], gone: list[int]) -> None:
    found = keeping.replaceable(infos(*losses), [f"step-{step:012d}" for step in bad])
    assert sorted(int(name[5:]) for name in found) == gone


def test_of_a_step_that_was_saved_twice_the_newer_counts() -> None:
    found = [Info(step, f"/x/step-{name}", {"loss": loss}) for step, name, loss in TWICE]
    assert Retention(2).surplus(found) == ["step-2.9", "step-2", "step-1"]
    assert Retention(2, 1).surplus(found) == ["step-2.9", "step-1"]


TWICE = ((1, "1", 3.0), (2, "2", 1.0), (2, "2.9", 2.0), (2, "2.10", 2.0), (3, "3", 5.0))


def test_a_metric_that_no_checkpoint_has_is_told_at_the_end(tmp_path: Path) -> None:
    told: list[str] = []
    with Checkpoints(tmp_path, keep_best=2, best="accuracy", say=told.append) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {}, metrics={"loss": 1.0})
    (line,) = told
    assert line == (
        'phalanx: no checkpoint has the metric "accuracy", so none is kept as one of the best 2; '
        "metrics of checkpoints: loss"
    )


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 8), keep_last=2, keep_best=2)
    assert steps(tmp_path) == [2, 3, 6, 7]


@pytest.mark.parametrize(
    "options", [{"keep_last": 0}, {"keep_best": -1}, {"mode": "up"}, {"busy": "no"}, {"buffers": 0}]
)
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Checkpoints(tmp_path, **options)


# -- damage

FILES = ("manifest.json", "state.json", "rank-00000.json", "rank-00000.safetensors")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def flip_first(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [truncate, empty, flip, flip_first, Path.unlink])
def test_the_newest_good_one_is_used_and_the_bad_one_named(tmp_path: Path, file: str, harm: Any) -> None:
    model = saved(tmp_path, 1, 2)
    harm(tmp_path / "step-000000000002" / file)
    told: list[str] = []
    with Checkpoints(tmp_path, keep_last=2, say=told.append) as checkpoints:
        assert checkpoints.load({"model": model}).step == 1
        assert bool((model.weight == 1).all())
        assert [*checkpoints.bad] == ["step-000000000002"]
        (line,) = told
        assert f"step-000000000002/{file}: " in line
        # It does not count among those that are kept.
        for step in (3, 4):
            assert "step-000000000001" in os.listdir(tmp_path)
            checkpoints.save(step, {"model": model})
            checkpoints.wait()
    assert steps(tmp_path) == [3, 4]


def test_what_differs_is_said(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    file = tmp_path / "step-000000000001" / "rank-00000.safetensors"
    size = file.stat().st_size
    flip(file)
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*: 1 corrupted") as caught:
        Checkpoints(tmp_path, say=lambda _: None).load({"model": model})
    assert "rank-00000.safetensors: model.weight: checksum is " in caught.value.details[0]
    truncate(file)
    info = Info(1, str(tmp_path / "step-000000000001"))
    with pytest.raises(CheckpointError, match="is corrupted") as caught:
        Checkpoints(tmp_path).load({"model": model}, info)
    assert caught.value.details[0].endswith(f"rank-00000.safetensors: has {size - 3:,} bytes, {size:,} were written")
    assert Checkpoints(tmp_path).latest() is None


def test_the_one_that_is_asked_for(tmp_path: Path) -> None:
    model = saved(tmp_path, 1, 2, 3)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load({"model": model}, Folder(str(tmp_path)).info("step-000000000002")).step == 2
    assert bool((model.weight == 2).all())
    flip(tmp_path / "step-000000000003" / FILES[3])
    with pytest.raises(CheckpointError, match="step-000000000003 is corrupted"):
        checkpoints.load({"model": model}, checkpoints.latest())


def test_read_while_another_run_saves(tmp_path: Path) -> None:
    """Which removes what is old, also while it is being read: that is not a bad one, and there is a newer."""
    model = saved(tmp_path, 0)
    pid = os.fork()
    if pid == 0:
        saved(tmp_path, *range(1, 60), keep_last=1)
        os._exit(0)
    told: list[str] = []
    seen = [0]
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        reader = Checkpoints(tmp_path, say=told.append)
        seen.append(reader.load({"model": model}).step)
        assert bool((model.weight == seen[-1]).all())
    assert told == []
    assert seen == sorted(seen)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", [*FILES, ".metadata", "data.pkl", "__0_0.distcp"])
def test_nothing_is_unpickled(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "checkpoints"
    model = saved(folder, 1, 2)
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    (folder / "step-000000000002" / file).write_bytes(bomb)
    os.mkdir(folder / "step-000000000003")
    (folder / "step-000000000003" / file).write_bytes(bomb)
    (folder / file).write_bytes(bomb)
    told: list[str] = []
    with Checkpoints(folder, say=told.append) as checkpoints:
        info = checkpoints.load({"model": model})
        checkpoints.save(5, {"model": model})
    assert info.step == (1 if file in FILES else 2)
    assert len(told) == 3 - info.step
    assert not (tmp_path / "boom").exists()
    pickle.loads(bomb)
    assert (tmp_path / "boom").exists()


# -- what cannot be done


def test_a_save_that_fails_is_told_and_later_ones_are_tried(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path / "a", buffers=1, say=told.append)
    checkpoints.save(1, {"model": model})
    checkpoints.wait()
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").write_text("in the way")
    checkpoints.save(2, {"model": model})
    checkpoints.save(3, {"model": model})  # needs the buffer: 2 has failed
    (line,) = told
    assert line.startswith("phalanx: the checkpoint of step 2 was not written\n")
    assert "Not a directory" in line
    with pytest.raises(CheckpointError, match="the checkpoint of step 3 was not written"):
        checkpoints.wait()
    checkpoints.save(4, {"model": model})
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Not a directory"):
        checkpoints.load({})
    (tmp_path / "a").unlink()
    (tmp_path / "b").rename(tmp_path / "a")
    checkpoints.save(5, {"model": model})
    checkpoints.close()  # the newest is there
    assert len(told) == 2
    assert Checkpoints(tmp_path / "a").latest().step == 5


def test_a_folder_that_is_not_required_is_tried_again(tmp_path: Path) -> None:
    """As after a failure of a rank: what cannot be saved now does not end a training."""
    told: list[str] = []
    (tmp_path / "a").write_text("in the way")
    with Checkpoints(tmp_path / "a", required=False, say=told.append) as checkpoints:
        assert not checkpoints.ready()
        assert not checkpoints.save(1, {})
        assert told == [
            f"phalanx: no checkpoint can be written to {tmp_path}/a: File exists; "
            "the training continues, and tries again at the next checkpoint"
        ]
        (tmp_path / "a").unlink()
        assert checkpoints.save(2, {})
    assert Checkpoints(tmp_path / "a").latest().step == 2


def test_a_failure_at_the_end_is_raised(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a")
    checkpoints.open()
    (tmp_path / "a" / ".lock").unlink()
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("in the way")
    checkpoints.save(1, {})
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
        checkpoints.close()
    checkpoints.close()


def test_an_error_in_the_loop_is_not_hidden(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def loop() -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"model": model})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert Checkpoints(tmp_path).latest().step == 1


def test_what_dead_savers_left_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    left = tmp_path / ".writing-step-000000000002-0123456789abcdef-1"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".removing-step-000000000000-0123").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert Checkpoints(tmp_path).latest().step == 1
    saved(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == [".lock", "notes.txt", "step-000000000001", "step-000000000003"]


def test_one_run_a_folder(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    hold = (
        "import fcntl,sys; f=open(sys.argv[1],'r+'); fcntl.lockf(f,fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.load({"model": model}).step == 1  # to read is free
            with pytest.raises(CheckpointError, match="another run is writing its checkpoints to"):
                checkpoints.open()
    with open(tmp_path / ".lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    saved(tmp_path, 2)


def test_one_writer_a_process(tmp_path: Path) -> None:
    """To which the kernel gives a lock twice, and takes it away at the first close."""
    first = Checkpoints(tmp_path)
    first.open()
    with Checkpoints(tmp_path / "." / "..") as elsewhere:
        elsewhere.open()
    with Checkpoints(tmp_path) as second:
        with pytest.raises(CheckpointError, match=r"already written to .* by this process"):
            second.open()
        assert second.latest() is None
    first.save(1, {})
    first.close()
    with Checkpoints(tmp_path) as second:
        second.open()
    second = Checkpoints(tmp_path)
    second.open()
    del second  # and not closed
    with Checkpoints(tmp_path) as third:
        third.open()


def test_a_fork_closes_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(256, 256)})
        pid = os.fork()
        if pid == 0:
            checkpoints.close()
            with pytest.raises(CheckpointError, match="belong to the parent of this process"):
                checkpoints.save(3, {})
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        checkpoints.save(2, {})
    assert steps(tmp_path) == [1, 2]


def test_what_does_not_fit(tmp_path: Path) -> None:
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
            "the model has model.3.weight, the checkpoint has not",
            "the model has model.3.bias, the checkpoint has not",
            "the checkpoint has model.1.bias, the model has not",
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
    ("kept", "extra", "said"),
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
def test_what_cannot_be_kept(tmp_path: Path, kept: dict[str, object], extra: dict[str, object], said: str) -> None:
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=said):
        checkpoints.save(1, kept, extra)
    assert steps(tmp_path) == []


class Told(nn.Module):
    """Nothing but words."""

    def get_extra_state(self) -> object:
        return "words"

    def set_extra_state(self, state: object) -> None:
        pass


def test_words_of_a_model_that_are_not_there(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": nn.ReLU()})
        with pytest.raises(CheckpointError, match="does not fit the model") as caught:
            checkpoints.load({"model": Told()})
    assert caught.value.details == ("the model has model._extra_state, the checkpoint has not",)


def test_a_file_that_ends_while_it_is_read(tmp_path: Path) -> None:
    """An error, and no SIGBUS."""
    saved(tmp_path, 1)
    path = tmp_path / "step-000000000001"
    folder = Folder(str(tmp_path))
    contents = loading.contents(folder.info(path.name), folder.manifest(path.name))
    file = loading._File(str(path), contents.tables[0])
    empty(path / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: is truncated"):
        file.checksum(0, 8)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: has 0 bytes"):
        loading.read(contents, {"model.weight": torch.empty(16, 32)})


# -- plain values, shares

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


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 7), st.data())
def test_everything_is_written_once(sizes: list[int], world_size: int, data: st.DataObject) -> None:
    tensors = {f"t{place}": torch.empty(size) for place, size in enumerate(sizes)}
    own = frozenset(data.draw(st.sets(st.sampled_from([*tensors])))) if tensors else frozenset()
    shares = [share(tensors, rank, world_size, own) for rank in range(world_size)]
    assert sorted(chunk.name for chunks in shares for chunk in chunks) == sorted(tensors)
    assert own <= {chunk.name for chunk in shares[0]}
    dealt = [sum(chunk.part.numel() for chunk in chunks if chunk.name not in own) for chunks in shares]
    assert max(dealt) - min(dealt) <= 50


# -- one file


def test_export(tmp_path: Path) -> None:
    model = nn.DataParallel(Odd())
    want = {name: value for name, value in model.module.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(
        CheckpointError, match=r"complex128 is of torch.complex128, which safetensors does not support"
    ) as caught:
        export(model, tmp_path / "model.safetensors")
    assert caught.value.fix == "export it to a .pt file"
    export(model, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == want.keys()
    assert all(equal(found[name], want[name]) for name in want)
    del model.module.complex128, want["complex128"]
    export(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == want.keys()
    assert all(equal(found[name], want[name]) for name in want)
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.safetensors"]


def test_a_view_is_exported_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.ones(1 << 20)[:4]])
    export(model, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1 << 16


def test_export_is_all_or_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"must end in \.safetensors or \.pt"):
        export(model, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        export(model, tmp_path / "nowhere" / "model.safetensors")
    (tmp_path / "model.pt").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        export(model, tmp_path / "model.pt")
    assert os.listdir(tmp_path) == ["model.pt"]
