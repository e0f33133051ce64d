"""`run.evaluate`: every sample counts once, at any number of ranks, and after a death in the middle of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.train.data.loader import Loader
from phalanx.train.evaluation import MeanOverSamples, check, evaluating, measure_batch, merge
from tests.kit.cli import phalanx as command

SCRIPT = str(Path(__file__).parent / "scripts" / "evaluation.py")


class Here:
    rank, world_size, seed = 0, 1, 0


def printed(out: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in out.splitlines() if '"samples"' in line]


@pytest.mark.extended
def test_the_result_does_not_depend_on_ranks_nor_on_a_death() -> None:
    alone = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=600)
    expected = printed(alone.stdout)
    assert [(one["samples"], one["counted"], one["generation"]) for one in expected] == [(301, 301, 0)] * 2
    for ranks, victim in ((2, None), (3, "1")):
        done = command("run", "-g", str(ranks), "--cpu", SCRIPT, *([victim] if victim else []))
        assert done.code == 0, done.out + done.err
        found = printed(done.out)
        assert [one.pop("generation") for one in found] == [1 if victim else 0] * 2
        for one, whole in zip(found, expected, strict=True):
            assert (one["samples"], one["counted"], one["accuracy"]) == (301, 301, whole["accuracy"])
            assert one["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_numbers_are_weighted_by_samples_and_padding_is_left_out() -> None:
    one, other = MeanOverSamples(), MeanOverSamples()
    one.add({"loss": torch.tensor(1.0), "right": torch.tensor([True, False, True])}, 3, 3)
    one.add({"loss": 4, "right": torch.tensor([[1.0, 0.0]])}, 1, 1)
    other.add({"right": torch.tensor([True, True])}, 1, 2)  # the second one is padding
    other.add({"loss": torch.tensor(9.0)}, 0, 1)  # a rank without samples
    nobody = MeanOverSamples()
    assert merge([one.totals(), other.totals(), nobody.totals()]) == {"samples": 5, "loss": 7 / 4, "right": 3.5 / 5}


@pytest.mark.parametrize(
    ("measured", "seen"),
    [
        (0.5, "measure() returned a float, expected a dict"),
        ({"loss": torch.zeros(7)}, "'loss' of shape [7], for a batch of 4"),
        ({"loss": "low"}, "'loss' of type str"),
        ({"samples": 3}, "which evaluate() counts itself"),
        ({"loss": 0.5}, "1 of the batch's 4 samples are padding"),
    ],
)
def test_invalid_measures_are_refused(measured: Any, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        MeanOverSamples().add(measured, 3, 4)
    assert seen in str(caught.value)


def test_invalid_arguments_of_evaluate_are_refused() -> None:
    data = Loader(range(10), Here(), batch_size=3, shuffle=True)
    for given, measure, kept, seen in (
        ([1, 2], print, False, "evaluate() was given a list"),
        (data, print, False, "drops its last samples"),
        (Loader(range(10), Here(), batch_size=3), print, True, "a loader of the training"),
        (Loader(range(10), Here(), batch_size=3), nn.functional, False, "expected a function of a batch"),
    ):
        with pytest.raises(UsageError) as caught:
            check(given, measure, kept=kept)
        assert seen in str(caught.value)
        assert "train=False" in str(caught.value.fix) or "measure" in str(caught.value.fix)


def test_a_batch_of_parts_is_unpacked() -> None:
    assert measure_batch(lambda x, y: x + y, [1, 2]) == 3
    assert measure_batch(lambda batch: batch["x"], {"x": 5}) == 5


def test_modes_are_restored_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()

    def fail() -> None:
        with evaluating([model]):
            assert not any(part.training for part in model.modules())
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [part.training for part in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
