"""A rank that dies between the updates of one step: the others have made a part of it, so none has a committed step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.train.kept.kept_objects import KeptObjects, TrainingProgress
from phalanx.train.schedule.snapshot_schedule import SnapshotSchedule
from phalanx.train.stepping.stepper import Stepper
from tests.kit.cli import Env, Result, phalanx, warm_environment

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "several_updates.py")


def trained(folder: Path, how: str, ranks: int, env: Env, *fault: str) -> Result:
    folder.mkdir()
    done = phalanx("run", "-g", str(ranks), "--cpu", SCRIPT, str(folder), how, *fault, env=env, timeout=150)
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize(
    ("how", "ranks"), [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.extended)]
)
def test_a_rank_that_dies_between_the_updates_of_a_step_costs_that_step(tmp_path: Path, how: str, ranks: int) -> None:
    with warm_environment("torch._dynamo") as env:
        trained(tmp_path / "undisturbed", how, ranks, env)
        done = trained(tmp_path / "killed", how, ranks, env, "5", "1")
    for rank in range(ranks):
        ends = [(tmp_path / name / f"end.{rank}").read_text() for name in ("undisturbed", "killed")]
        assert ends[0] == ends[1]
        assert (tmp_path / "killed" / f"begun.{rank}").read_text().split() == ["0", "5"]
    assert "no step lost" in done.err


class Snapshots:
    """Records the steps that are saved."""

    costs = durations = ()
    held = 0.0

    def __init__(self) -> None:
        self.saved: list[int] = []

    def committed(self, step: int) -> None:
        pass

    def wanted(self, step: int) -> bool:
        return False

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def save(self, step: int, *_: object) -> None:
        self.saved.append(step)


def test_a_training_may_begin_with_one_update_per_step() -> None:
    """Such as that of a discriminator, before the first one of its generator."""
    opt = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    stepper, counter = Stepper(), TrainingProgress()
    schedule, snapshots = SnapshotSchedule(KeptObjects(stepper), counter, stepper), Snapshots()
    schedule.snapshots = snapshots  # type: ignore[assignment]
    for step, updates in enumerate((1, 1, 2, 1), 1):
        for update in range(updates):
            stepper.step(opt, commit=update == updates - 1)
        counter.steps = step
        schedule.committed(None)  # type: ignore[arg-type]
    assert snapshots.saved == [3, 4]
