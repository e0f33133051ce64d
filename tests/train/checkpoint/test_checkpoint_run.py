"""Checkpoints in a training: `run.keep` in a real script, with failures."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.kit.cli import Result, phalanx, start
from tests.kit.imported import python

SCRIPT = """
import resource, sys, time, torch, phalanx
from torch import nn

WIDTH, BAD, STEPS, PAUSE = (int(word) for word in sys.argv[1:5])

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def written(run):
    while run._checkpoints.checkpoints.under_way:
        time.sleep(0.001)

def train(run):
    model = nn.Linear(64, WIDTH)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run.checkpoints(every=2)
    run.keep(model, opt)
    net = run.wrap(model)
    while run.steps < STEPS:
        if run.steps + 1 == BAD:
            written(run)
            limit(4096)  # no file may be longer: as a disk that is full for a while
        loss = net(torch.ones(4, 64)).mean()
        run.backward(loss)
        run.step(opt, loss=loss)
        if run.steps == BAD:
            written(run)
            limit(resource.RLIM_INFINITY)
        if PAUSE:
            print("step", run.steps, flush=True)
            time.sleep(PAUSE / 1000)
    run.print("trained", run.steps)

phalanx.main(train)
"""


pytestmark = pytest.mark.imported


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def alone(script: str, folder: Path, *args: int) -> Result:
    return python(script, *map(str, args), env={"PHALANX_CHECKPOINTS": str(folder)})


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith(("step-", ".w", ".r")))


def test_a_save_that_fails_does_not_end_the_training(script: str, tmp_path: Path) -> None:
    done = alone(script, tmp_path / "kept", 64, 4, 8, 0)
    assert (done.code, done.out) == (0, "trained 8\n"), done.err
    assert "phalanx: the checkpoint of step 4 was not written\n" in done.err
    assert "rank 0: File too large" in done.err
    assert names(tmp_path / "kept") == ["step-000000000006", "step-000000000008"]
    # The last one: the training is complete and nothing is hidden.
    done = alone(script, tmp_path / "other", 64, 8, 8, 0)
    assert (done.code, done.out) == (1, "trained 8\n"), done.err
    assert "phalanx: the training is complete, but its last checkpoint was not written (step 8)\n" in done.err
    assert "rank 0: File too large\n  the newest checkpoint is that of step 6\n" in done.err
    assert "Traceback" not in done.err
    assert names(tmp_path / "other") == ["step-000000000004", "step-000000000006"]


@pytest.mark.extended
@pytest.mark.warmed
def test_two_runs_and_one_folder(script: str, tmp_path: Path) -> None:
    """The second is rejected. The first is ended by SIGTERM at any point, and resumed; but not with another model."""
    kept = tmp_path / "kept"
    job = start("run", "-g", "2", "--cpu", "--checkpoints", str(kept), script, "64", "0", "100000", "5")
    job.wait_for("step 6")
    refused = alone(script, kept, 64, 0, 100000, 0)
    assert refused.code == 1
    assert f"phalanx: another run is writing its checkpoints to {kept}" in refused.err
    job.wait_for("step 20")
    job.signal(signal.SIGTERM)
    job.wait()
    left = [name for name in names(kept) if name.startswith("step-")]
    last = int(left[-1][5:])
    assert last >= 6
    words = ("run", "-g", "1", "--cpu", "--quiet", "--checkpoints", str(kept), script)
    resumed = phalanx(*words, "64", "0", str(last + 2), "0")
    assert resumed.code == 0, resumed.err
    assert f"resumed at step {last}" in resumed.out
    assert f"trained {last + 2}" in resumed.out
    before = last + last % 2  # it ends at any step, and every second one is saved
    assert names(kept) == [f"step-{before:012d}", f"step-{last + 2:012d}"]
    refused = alone(script, kept, 32, 0, last + 4, 0)
    assert refused.code == 1
    assert 'phalanx: the checkpoint does not fit the model kept as "model"' in refused.err
    assert "model.weight is (32, 64) in the model, (64, 64) in the checkpoint" in refused.err
    assert "Traceback" not in refused.err
