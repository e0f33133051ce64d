"""Loops through `Run` on two ranks: what counts, what is kept, and which mistakes are reported."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import phalanx as command

SCRIPT = str(Path(__file__).parent / "scripts" / "loops.py")
pytestmark = [pytest.mark.xdist_group("loops"), pytest.mark.warmed]  # one launch serves them all


@functools.cache
def seen() -> list[dict[str, Any]]:
    """Return the observations of every rank, from one launch for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        done = command("run", "-g", "2", "--cpu", SCRIPT, folder)
        assert done.code == 0, done.out + done.err
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_that_differ_are_refused_before_the_first_update() -> None:
    for rank in seen():
        found = rank["different"]
        assert found.pop("nothing") == "no error"
        assert all(text.startswith("0 steps\nthe ranks have different ") for text in found.values()), found
        assert "seed: 0 on rank 0; 1 on rank 1" in found["seed"]
        assert "Linear weight: (2, 6) float32 on rank 0; (2, 5) float32 on rank 1" in found["model"]
        assert "model weight: (2, 6) float32 on rank 0; (2, 5) float32 on rank 1" in found["kept model"]
        for kind in ("data", "kept data"):
            assert "loader length: 80 samples on rank 0; 72 samples on rank 1" in found[kind]
        assert "loader batches: 8 samples per step" in found["batch"]


def test_a_loss_for_every_sample_leaves_padding_out() -> None:
    for rank in seen():
        found = rank["padded"]
        assert found["each"] == pytest.approx(found["plain"], rel=1e-4)
        assert found["mean"] != pytest.approx(found["plain"], rel=1e-2)
        assert found["each warnings"] == []
    # By the rank that has both padding and a counted sample, once in two epochs.
    (warning,), nothing = (rank["padded"]["mean warnings"] for rank in seen())
    assert nothing == []
    assert warning.startswith("7 of this batch's 8 samples are padding")
    assert "run.backward(losses)" in warning


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_end_of_an_epoch_ends_a_window(how: str) -> None:
    for rank in seen():
        found = rank["windows"][how]
        assert found["updates"] == [3, 7, 10, 14, 18, 21]
        assert found["steps"] == 6
        assert found["weights"] == pytest.approx(rank["windows"]["plain"], rel=1e-4)
        # Samples count with the update that contains them.
        assert found["positions"] == [0, 0, 0, 32, 32, 32, 32, 64, 64, 64, 81]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_an_evaluation_in_the_middle_sees_each_sample_once(how: str) -> None:
    assert [rank["windows"][how]["seen"] for rank in seen()] == [[81] * 4] * 2


def test_a_model_that_the_script_has_wrapped_is_weighed_for() -> None:
    for rank in seen():
        assert rank["foreign"]["ours"] == pytest.approx(rank["foreign"]["plain"], rel=1e-4)


@pytest.mark.parametrize("order", ["opt keep wrap", "opt wrap keep", "wrap opt keep", "wrapped"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_kept_in_any_order(how: str, order: str) -> None:
    """A checkpoint in the middle of a window: when resumed, the window is repeated, and the result is the same bit for
    bit.
    """
    for rank in seen():
        began, end = rank["kept"][f"{how}, {order}"]
        assert began == [0, 4]
        assert end == rank["kept"][how]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_models_and_two_optimizers(how: str) -> None:
    for rank in seen():
        assert rank["rivals"][how] == pytest.approx(rank["rivals"]["plain"], rel=1e-4)
        assert rank["rivals"][f"{how} steps"] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("mistake", "fix"),
    [
        ("unwrapped", "ddp = run.wrap(model), and then ddp(x)"),
        ("undivided", "run.loader(dataset, batch_size=4, shuffle=True) in place of the DataLoader"),
        ("undivided, in order, with workers", "run.loader(dataset, batch_size=4) in place of the DataLoader"),
        ("undivided, without run.batches", "run.batches(data) in the loop"),
        (
            "undivided, without run.batches, with workers",
            "data = run.loader(dataset, batch_size=4) in place of the Data",
        ),
        ("no backward", "run.backward(loss) before run.step(opt)"),
        ("opt.step", "run.step(opt, loss=loss) in place of opt.step()"),
    ],
)
def test_a_mistake_is_reported_once_by_one_rank(mistake: str, fix: str) -> None:
    (warning,), nothing = (rank["misused"][mistake] for rank in seen())
    assert fix in warning
    assert nothing == []


def test_correct_loops_have_no_warnings() -> None:
    """Accumulation, frozen parameters, DDP and FSDP of torch, evaluation, data that the script divides itself."""
    assert [rank["misused"]["right"] for rank in seen()] == [[], []]
