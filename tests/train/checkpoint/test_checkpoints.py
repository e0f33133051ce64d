"""Saving and loading: what a checkpoint restores, when a save waits or is skipped, what happens after a failed save."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.errors import OptionError
from phalanx.train.checkpoint import CheckpointError, Checkpoints, Info, randomness
from phalanx.train.checkpoint.shares import share
from tests.train.checkpoint.folders import steps
from tests.train.checkpoint.trainings import Training, same


def test_training_resumes_bit_equal(tmp_path: Path) -> None:
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


def test_load_waits_for_a_save_in_progress(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    want = model.weight.detach().clone()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model})
        model.weight.data.zero_()
        assert checkpoints.load({"model": model}).step == 1
    assert torch.equal(model.weight, want)


def test_random_state_is_restored_only_on_request(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.wait()
        torch.manual_seed(5)
        want = torch.rand(3)
        torch.manual_seed(5)
        checkpoints.load({}, random=False)
        assert torch.equal(torch.rand(3), want)


def test_a_new_rank_draws_its_own_random_numbers() -> None:
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


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    training = Training(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, training.kept)
        assert training.opt.state_dict()["state"] == {}
        training.step()
        checkpoints.load(training.kept)
    assert training.opt.state_dict()["state"] == {}


def test_a_save_waits_or_is_skipped_when_buffers_are_busy(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    with Checkpoints(tmp_path / "wait", buffers=1, keep_last=99) as checkpoints:
        assert all(checkpoints.save(step, {"model": model}) for step in range(5))
    assert steps(tmp_path / "wait") == list(range(5))
    with Checkpoints(tmp_path / "skip", buffers=1, busy="skip", keep_last=99) as checkpoints:
        done = [step for step in range(30) if checkpoints.save(step, {"model": model})]
    assert steps(tmp_path / "skip") == done
    assert 0 < len(done) < 30


def test_only_the_writer_thread_has_a_lower_priority(tmp_path: Path) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    before = set(os.listdir("/proc/self/task"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.wait()
        (writer,) = set(os.listdir("/proc/self/task")) - before
        assert os.getpriority(os.PRIO_PROCESS, int(writer)) == min(19, own + 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_memory_is_bounded_by_the_number_of_buffers(tmp_path: Path) -> None:
    """There are at most as many copies as buffers, however many saves follow each other."""
    model = nn.Linear(2048, 2048)  # 16 MiB
    process = psutil.Process()
    before = process.memory_info().rss
    most = 0
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in range(8):
            checkpoints.save(step, {"model": model})
            most = max(most, process.memory_info().rss)
    assert most - before < 44 << 20


def test_a_failed_save_is_reported_and_later_saves_are_tried(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    messages: list[str] = []
    checkpoints = Checkpoints(tmp_path / "a", buffers=1, say=messages.append)
    checkpoints.save(1, {"model": model})
    checkpoints.wait()
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").write_text("in the way")
    checkpoints.save(2, {"model": model})
    checkpoints.save(3, {"model": model})  # needs the buffer: save 2 has failed
    (line,) = messages
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
    assert len(messages) == 2
    assert Checkpoints(tmp_path / "a").latest().step == 5


def test_an_optional_folder_is_tried_at_the_next_save(tmp_path: Path) -> None:
    """As after the failure of a rank: a checkpoint that cannot be written does not end the training."""
    messages: list[str] = []
    (tmp_path / "a").write_text("in the way")
    with Checkpoints(tmp_path / "a", required=False, say=messages.append) as checkpoints:
        assert not checkpoints.ready()
        assert not checkpoints.save(1, {})
        assert messages == [
            f"phalanx: no checkpoint can be written to {tmp_path}/a: File exists; "
            "the training continues, and tries again at the next checkpoint"
        ]
        (tmp_path / "a").unlink()
        assert checkpoints.save(2, {})
    assert Checkpoints(tmp_path / "a").latest().step == 2


def test_close_raises_if_the_last_save_failed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a")
    checkpoints.open()
    (tmp_path / "a" / ".lock").unlink()
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("in the way")
    checkpoints.save(1, {})
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written"):
        checkpoints.close()
    checkpoints.close()


def test_an_error_in_the_training_loop_is_raised(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def loop() -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"model": model})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert Checkpoints(tmp_path).latest().step == 1


@pytest.mark.parametrize(
    "options", [{"keep_last": 0}, {"keep_best": -1}, {"mode": "up"}, {"busy": "no"}, {"buffers": 0}]
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Checkpoints(tmp_path, **options)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 7), st.data())
def test_ranks_write_every_tensor_once(sizes: list[int], world_size: int, data: st.DataObject) -> None:
    tensors = {f"t{place}": torch.empty(size) for place, size in enumerate(sizes)}
    own = frozenset(data.draw(st.sets(st.sampled_from([*tensors])))) if tensors else frozenset()
    shares = [share(tensors, rank, world_size, own) for rank in range(world_size)]
    assert sorted(chunk.name for chunks in shares for chunk in chunks) == sorted(tensors)
    assert own <= {chunk.name for chunk in shares[0]}
    dealt = [sum(chunk.part.numel() for chunk in chunks if chunk.name not in own) for chunks in shares]
    assert max(dealt) - min(dealt) <= 50
