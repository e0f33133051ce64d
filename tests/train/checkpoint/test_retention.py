"""Which checkpoints are kept, and which are deleted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.train.checkpoint import Checkpoints, Info
from phalanx.train.checkpoint.retention import Retention
from tests.train.checkpoint.folders import saved, steps


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
        (Retention(1, 1), (2, 2, 9), [], [1]),  # the newer of equal ones
        (Retention(2), (5, 4, 3), [9, 0], [0, 1]),  # a bad one does not count, and is removed when it is old
        (Retention(2), (5,), [0], []),
        (Retention(1, 1), (math.inf, 7, math.nan, 8), [], [1, 3]),  # NaN and infinity are never the best
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
        (Retention(1), (5,), [], []),  # the newest good one is kept, even if the next one will replace it
        (Retention(1), (5, 4), [9, 0], [0, 1]),
        (Retention(2, 1), (1, 5, 4), [], [2]),
    ],
)
def test_replaceable(keeping: Retention, losses: tuple[float, ...], bad: list[int], gone: list[int]) -> None:
    found = keeping.replaceable(infos(*losses), [f"step-{step:012d}" for step in bad])
    assert sorted(int(name[5:]) for name in found) == gone


SAVED_TWICE = ((1, "1", 3.0), (2, "2", 1.0), (2, "2.9", 2.0), (2, "2.10", 2.0), (3, "3", 5.0))


def test_the_newer_save_of_a_step_counts() -> None:
    found = [Info(step, f"/x/step-{name}", {"loss": loss}) for step, name, loss in SAVED_TWICE]
    assert Retention(2).surplus(found) == ["step-2.9", "step-2", "step-1"]
    assert Retention(2, 1).surplus(found) == ["step-2.9", "step-1"]


def test_a_metric_that_no_checkpoint_has_is_reported_at_close(tmp_path: Path) -> None:
    messages: list[str] = []
    with Checkpoints(tmp_path, keep_best=2, best="accuracy", say=messages.append) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {}, metrics={"loss": 1.0})
    (line,) = messages
    assert line == (
        'phalanx: no checkpoint has the metric "accuracy", so none is kept as one of the best 2; '
        "metrics of checkpoints: loss"
    )


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 8), keep_last=2, keep_best=2)
    assert steps(tmp_path) == [2, 3, 6, 7]
