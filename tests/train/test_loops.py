"""Loops through `Run` in one process: what counts, what is committed, what an evaluation does not change."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import phalanx
from phalanx.errors import CheckpointError, UsageError
from tests.train.trainings_alone import Training, alone, lines, numbers

pytestmark = [pytest.mark.xdist_group("loops"), pytest.mark.warmed]


@pytest.fixture(autouse=True)
def _inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first optimizer of a process imports torch._dynamo, which would set this permanently."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[phalanx.Run]:
    with alone(tmp_path) as run:
        yield run


def test_a_step_calls_few_functions(run: phalanx.Run) -> None:
    """Counted, because a busy machine cannot measure microseconds."""
    training, calls, counts = Training(run), [0], []
    data = run.loader(numbers(100), batch_size=2, shuffle=True)
    run.keep(training.model, training.opt, data, best=0.0)

    def count(frame: FrameType, event: str, _: object) -> None:
        calls[0] += event == "call" and "/phalanx/train/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        for x, y in run.batches(data):
            training.step(x, y)
            counts.append(calls[0])
    finally:
        sys.setprofile(None)
    assert min(after - before for before, after in pairwise(counts)) <= 80


def test_a_batch_of_tensors_is_not_converted_from_a_list(run: phalanx.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    data = run.loader(numbers(), batch_size=2)
    monkeypatch.setattr(torch, "tensor", None)
    assert [x.shape for x, _ in run.batches(data)] == [(2, 3)] * 5


def test_an_evaluation_commits_nothing_and_starts_from_the_beginning(run: phalanx.Run) -> None:
    training = Training(run)
    train, test = run.loader(numbers(), batch_size=2), run.loader(numbers(), batch_size=3, drop_last=False)
    sizes = []
    for number, (x, y) in enumerate(run.batches(train)):
        for part, _ in run.batches(test):
            sizes.append(len(part))
            if number == 1:
                break
        training.step(x, y)
        assert train.position.consumed == 2 * number + 2
        assert test.position.consumed == 0
    assert sizes == [3, 3, 3, 1, 3, *[3, 3, 3, 1] * 3]
    assert run.steps == 5


def test_a_loop_that_has_failed_is_begun_again(run: phalanx.Run) -> None:
    """As in a notebook, where the traceback keeps it alive."""
    training = Training(run, accumulate=2)
    data = run.loader(numbers(), batch_size=2)
    held = run.batches(data)
    assert len(list(islice(held, 5))) == 5
    done = [training.step(x, y) for x, y in run.batches(data)]
    assert done == [False, True, False, True, True]
    assert data.position.consumed == 10
    held.close()


def test_two_loaders_side_by_side_are_both_committed(run: phalanx.Run) -> None:
    training = Training(run)
    first, second = run.loader(numbers(), batch_size=2), run.loader(numbers(20), batch_size=4)
    for (x, y), (other, _) in zip(run.batches(first), run.batches(second), strict=True):
        training.step(torch.cat([x, other]), torch.cat([y, other.sum(1, keepdim=True)]))
        if run.steps == 3:
            break
    assert (first.position.consumed, second.position.consumed) == (6, 12)


def test_a_loop_over_the_loader_is_one_of_the_run(run: phalanx.Run) -> None:
    """Its samples are counted, committed and seeded in the same way."""
    seen: list[tuple[Any, ...]] = []
    for directly in (False, True):
        data = run.loader(numbers(), batch_size=2, shuffle=True)
        training = Training(run)
        for x, y in data if directly else run.batches(data):
            training.step(x, y)
            if data.position.consumed == 6:
                break
        left = [x for x, _ in (data if directly else run.batches(data))]
        seen.append((data.position.consumed, *left))
    for before, now in zip(*seen, strict=True):
        assert torch.equal(torch.as_tensor(before), torch.as_tensor(now))
    assert seen[0][0] == 6


def test_a_loader_of_torch_is_divided_as_it_stands(run: phalanx.Run) -> None:
    def collate(parts: list[Any]) -> Any:
        return torch.stack([x for x, _ in parts])

    made = DataLoader(numbers(), batch_size=4, shuffle=True, drop_last=True, collate_fn=collate, timeout=0)
    same = run.loader(numbers(), batch_size=4, shuffle=True, drop_last=True, collate_fn=collate)
    loader = run.loader(made)
    assert (len(loader), loader.global_batch, loader.tail) == (2, 4, "drop")
    assert [x.tolist() for x in loader] == [x.tolist() for x in same]
    assert run.loader(made, global_batch=5).global_batch == 5
    assert [loader.tail for loader in (run.loader(DataLoader(numbers(), 4)), run.loader(made, train=True))] == [
        "uneven",
        "drop",
    ]
    assert [len(x) for x in run.loader(DataLoader(Stream(), 2))] == [2, 2, 1]


@pytest.mark.parametrize(
    ("loader", "options", "seen"),
    [
        (DataLoader(range(8), 4), {"num_workers": 2, "shuffle": True}, "shuffle=True, num_workers=2, which the"),
        (DataLoader(range(8), batch_size=None), {}, "has no batch_size"),
        (DataLoader(range(8), batch_sampler=[[1, 2], [3]]), {"batch_size": 2}, "has no batch_size"),
        (DataLoader(range(8), 4, sampler=[1, 2, 3]), {}, "has a list: run.loader chooses"),
        (DataLoader(range(8), 4, sampler=RandomSampler(range(8), replacement=True)), {}, "has a RandomSampler"),
        (DataLoader(range(8), 4, sampler=RandomSampler(range(8), num_samples=4)), {}, "has a RandomSampler"),
    ],
)
def test_a_loader_of_torch_that_cannot_be_divided(
    run: phalanx.Run, loader: Any, options: dict[str, Any], seen: str
) -> None:
    with pytest.raises(UsageError) as caught:
        run.loader(loader, **options)
    assert seen in str(caught.value)


def test_anything_can_be_read(run: phalanx.Run) -> None:
    training = Training(run, accumulate=2)
    for _ in range(2):
        done = [training.step(x, y) for x, y in run.batches(DataLoader(numbers(), batch_size=4))]
        assert done == [False, True, True]


def test_losses_of_samples_are_averaged_where_no_loader_counts_them(run: phalanx.Run) -> None:
    training = Training(run)
    x, y = numbers()[:]
    training.net.eval()
    grads = []
    for reduction in ("mean", "none"):
        run.backward(mse_loss(training.net(x), y, reduction=reduction))
        grads.append(training.model[0].weight.grad.clone())
        training.opt.zero_grad()
    torch.testing.assert_close(*grads)


class Stream(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(5, 3))


class Known(Stream):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("dataset", "updates"), [(Stream(), [3, 6, 9]), (Known(), [3, 5, 8, 10])], ids=["no length", "length"]
)
def test_windows_of_a_stream(run: phalanx.Run, dataset: Stream, updates: list[int]) -> None:
    """Without a length a window continues in the next epoch; an incomplete last one is reported."""
    training = Training(run, accumulate=3)
    data = run.loader(dataset, batch_size=1)
    done: list[bool] = []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for _ in run.epochs(2):
            done += [training.step(x, x[:, :1]) for x in run.batches(data)]
    assert [number for number, update in enumerate(done, 1) if update] == updates
    assert ["made no update" in str(warning.message) for warning in raised] == [True] * (updates[-1] < 10)


def test_steps_of_one_batch_are_one_commit(run: phalanx.Run, tmp_path: Path) -> None:
    training = Training(run)
    for x, y in run.batches(run.loader(numbers(), batch_size=5)):
        training.step(x, y, commit=False, first=1.0)
        training.step(x, y, second=2.0)
    run.group.close()
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [1, 2]
    assert all((line["first"], line["second"]) == (1.0, 2.0) for line in found)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 3)])
def test_a_loss_of_no_meaning(run: phalanx.Run, shape: tuple[int, ...]) -> None:
    for _ in run.batches(run.loader(numbers(), batch_size=2)):
        with pytest.raises(UsageError, match=f"shape {list(shape)}, for a batch of 2".replace("[", r"\[")):
            run.backward(torch.ones(shape, requires_grad=True))
        break


def test_epochs_continue_in_a_second_loop(run: phalanx.Run) -> None:
    data = run.loader(numbers(), batch_size=5, shuffle=True)
    training = Training(run)
    run.keep(data=data, model=training.model)
    seen = []
    for count in (2, 4):
        for epoch in run.epochs(count):
            for x, y in run.batches(data):
                training.step(x, y)
            seen.append((epoch, data.epoch))
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert (run._counter.epoch, run.steps) == (4, 8)


def test_progress_counts_updates_to_the_very_end(run: phalanx.Run) -> None:
    training = Training(run, accumulate=3)
    data = run.loader(numbers(), batch_size=1)
    assert [len(x) for x, _ in run.batches(run.loader(numbers(), batch_size=5))] == [5, 5]  # before the training begins
    views = []
    for _ in run.epochs(3):
        for x, y in run.batches(data):
            if training.step(x, y):
                assert run._reporter.bar is not None
                views.append(run._reporter.bar.view())
    assert [sight.step for sight in views] == list(range(1, 13))
    assert {sight.total for sight in views} == {12}
    assert [sight.title for sight in views[::4]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_metrics_of_a_loop_of_ones_own(run: phalanx.Run, tmp_path: Path) -> None:
    training = Training(run)
    for _ in range(3):
        training.step(*numbers()[:])
    run.group.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_metric_is_one_number(run: phalanx.Run) -> None:
    training = Training(run)
    x, y = numbers()[:]
    losses = mse_loss(training.net(x), y, reduction="none").flatten()
    run.backward(losses)
    with pytest.raises(UsageError, match="loss"):
        run.step(training.opt, loss=losses)


def test_objects_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path) as run, pytest.raises(UsageError, match=r"data is a .*DataLoader, which cannot be kept"):
        run.keep(nn.Linear(1, 1), data=DataLoader(numbers()))
    with alone(tmp_path) as run:
        run.checkpoints(tmp_path / "kept")
        with pytest.raises(CheckpointError, match="for a model that is not kept"):
            run.keep(opt=Training(run).opt)
    with alone(tmp_path) as run:
        training = Training(run)
        run.keep(model=training.model)
        with pytest.raises(UsageError, match=r"run.keep\(model, opt\), once"):
            run.keep(opt=training.opt)


def test_other_data_is_refused(tmp_path: Path) -> None:
    for count, refusal in (
        (10, contextlib.nullcontext()),
        (12, pytest.raises(UsageError, match="the data has changed")),
    ):
        with alone(tmp_path) as run:
            training = Training(run)
            data = run.loader(numbers(count), batch_size=2)
            with refusal:
                run.checkpoints(tmp_path / "kept")
                run.keep(model=training.model, data=data)
                training.step(*numbers()[:])
                run.checkpoint()


def test_what_a_script_draws_before_its_loop_does_not_matter(tmp_path: Path) -> None:
    def train(stop: int | None, *, folder: Path) -> list[float]:
        with alone(folder) as run:
            training = Training(run)
            data = run.loader(numbers(), batch_size=2, shuffle=True)
            run.checkpoints(folder, every=1)
            if run.keep(model=training.model, opt=training.opt, data=data) is not None:
                torch.randn(5)
            for _ in run.epochs(2):
                for x, y in run.batches(data):
                    training.step(x, y)
                    if run.steps == stop:
                        return []
            return [parameter.sum().item() for parameter in training.model.parameters()]

    whole = train(None, folder=tmp_path / "whole")
    train(7, folder=tmp_path / "parts")
    assert train(None, folder=tmp_path / "parts") == whole


def test_an_update_that_breaks_off_belongs_to_no_step(run: phalanx.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes must not mistake such a state for that of the last committed step."""
    training = Training(run)
    data = run.loader(numbers(), batch_size=2)
    run.keep(model=training.model, opt=training.opt, data=data)
    batches = run.batches(data)
    x, y = next(batches)
    run.backward(nn.functional.mse_loss(training.net(x), y))
    run.step(training.opt)
    assert not run._stepper.torn
    x, y = next(batches)
    run.backward(nn.functional.mse_loss(training.net(x), y))
    monkeypatch.setattr(training.opt, "zero_grad", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step(training.opt)
    assert run._stepper.torn
    assert run.steps == 1
