"""The state of a tracker's run, however the training ends. Fakes of the trackers write down how they were ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.kit.cli import start, until

pytestmark = [pytest.mark.extended, pytest.mark.warmed]

WANDB = """
import os, types
run = None

def init(**_):
    global run
    run = types.SimpleNamespace(id="abc")
    return run

def log(values, step):
    pass

def finish(exit_code=0):
    with open(os.environ["ENDED"], "a") as file:
        file.write(f"wandb {exit_code}\\n")
"""
MLFLOW = """
import os, types
entities = types.SimpleNamespace(Metric=lambda *metric: metric, Param=lambda *param: param)
_active = None

class MlflowClient:
    def log_batch(self, *_, **__):
        pass

    def set_terminated(self, run_id, status):
        with open(os.environ["ENDED"], "a") as file:
            file.write(f"mlflow {status}\\n")

def active_run():
    return _active

def start_run(**_):
    global _active
    _active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="def"))
    return _active

def end_run(status="FINISHED"):
    MlflowClient().set_terminated("def", status)
"""
SCRIPT = """
import sys, time
import torch, phalanx

def train(run):
    model = run.wrap(torch.nn.Linear(1, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model, opt)
    for step in range(100_000):
        run.backward(model(torch.ones(1, 1)).mean())
        run.step(opt, loss=0.5)
        if step == 2:
            print("under way", flush=True)
        if run.rank == 1 and sys.argv[1] == "fail":
            raise ValueError("broken")
        time.sleep(0.01)

phalanx.main(train, log_to=["wandb", "mlflow"])
"""


@pytest.mark.parametrize(
    ("how", "code", "ended"),
    [
        (signal.SIGINT, 130, ["mlflow KILLED", "wandb 255"]),
        (signal.SIGTERM, 143, ["mlflow KILLED", "wandb 255"]),  # as `phalanx stop` does
        (None, 1, ["mlflow FAILED", "wandb 1"]),  # rank 0 sends metrics, and another rank fails
    ],
    ids=["Ctrl-C", "stop", "failure"],
)
def test_how_a_run_ended(how: signal.Signals | None, code: int, ended: list[str], tmp_path: Path) -> None:
    for name, text in (("wandb", WANDB), ("mlflow", MLFLOW), ("script", SCRIPT)):
        (tmp_path / f"{name}.py").write_text(text)
    wrote = tmp_path / "ended"
    words = ("run", "-g", "2", "--cpu", str(tmp_path / "script.py"), "stay" if how else "fail")
    job = start(*words, env={"ENDED": str(wrote)})
    if how is not None:
        until(lambda: job.process.poll() is not None or job.out.count("under way") == 2, 60, "some steps to be made")
        job.process.send_signal(how)
    assert job.wait() == code, job.both
    assert sorted(wrote.read_text().splitlines()) == ended
