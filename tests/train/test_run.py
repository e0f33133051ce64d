"""A whole training through `Run`, with real ranks: the same result however many, killed and resumed."""

from __future__ import annotations

import functools
import json
import random
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.kit.cli import Result, phalanx, run, start, torchrun
from tests.kit.imported import python

# They share the result of an undisturbed training.
pytestmark = [pytest.mark.xdist_group("run"), pytest.mark.warmed]

SCRIPT = """
import os, sys, time, torch, phalanx
from torch import nn
from torch.utils.data import TensorDataset

HOW, DROPOUT, STOP = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])

def train(run):
    make = torch.Generator().manual_seed(7)
    x = torch.randn(210, 8, generator=make)
    y = (x ** 2).sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(32, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
    data = run.loader(TensorDataset(x, y), global_batch=30, shuffle=True, drop_last=False)
    run.checkpoints(every=4)
    run.keep(model, opt, decay, data)
    net = run.wrap(model, HOW)
    losses = []
    for epoch in run.epochs(3):
        for xb, yb in run.batches(data):
            loss = nn.functional.mse_loss(net(xb), yb)
            run.backward(loss)
            run.step(opt, clip=1.0, scheduler=decay, loss=loss)
            losses.append(run.group.sum(loss * len(xb)) / 30)
            if run.steps == STOP:
                run._checkpoints.checkpoints.wait()  # the test is about resuming, not about timing
                print("stopping", flush=True)
                time.sleep(60)
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    whole = torch.cat([part.detach().flatten() for part in parts])
    run.print("result", run.steps, f"{losses[-1]:.5f}", whole.double().sum().item(), whole.double().norm().item())

phalanx.main(train)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def result(done: Result) -> list[float]:
    assert done.code == 0, done.out + done.err
    found = re.search(r"result (\S+) (\S+) (\S+) (\S+)", done.out)
    assert found, done.out + done.err
    return [float(number) for number in found.groups()]


def on(ranks: int, script: str, *args: str, options: tuple[str, ...] = ()) -> Result:
    return phalanx("run", "-g", str(ranks), "--cpu", "--quiet", *options, script, *args)


@functools.cache
def whole(ranks: int, script: str, how: str = "ddp", dropout: str = "0") -> list[float]:
    """Return the result of an undisturbed training."""
    return result(on(ranks, script, how, dropout, "0"))


@pytest.mark.extended
@pytest.mark.imported
def test_any_number_of_ranks_gives_the_same_result(script: str) -> None:
    alone = result(python(script, "ddp", "0", "0"))
    assert alone[0] == 21
    for how, ranks in (("ddp", 2), ("ddp", 3), ("fsdp", 2)):
        assert whole(ranks, script, how) == pytest.approx(alone, rel=1e-4), (how, ranks)


@pytest.mark.extended
def test_the_same_script_under_torchrun(script: str) -> None:
    theirs = result(torchrun("--standalone", "--nproc-per-node", "2", script, "ddp", "0.1", "0"))
    assert whole(2, script, dropout="0.1") == theirs


@pytest.mark.extended
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1)])
def test_killed_and_resumed(script: str, tmp_path: Path, before: int, after: int) -> None:
    """Bit for bit with the same number of ranks, including dropout; otherwise to float tolerance, without dropout."""
    dropout = "0.1" if before == after else "0"
    folder = ("--checkpoints", str(tmp_path / "kept"))
    stop = random.randrange(5, 20)
    job = start("run", "-g", str(before), "--cpu", *folder, script, "ddp", dropout, str(stop))
    job.wait_for("stopping", count=before)
    job.signal(signal.SIGKILL)
    job.wait()
    resumed = on(after, script, "ddp", dropout, "0", options=folder)
    step = stop - stop % 4
    assert f"resumed at step {step}, epoch {(step - 1) // 7}" in resumed.out, stop
    if before == after:
        assert result(resumed) == whole(before, script, dropout=dropout), stop
    else:
        assert result(resumed) == pytest.approx(whole(before, script), rel=1e-4), stop
    lines = [json.loads(line) for line in (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 22)), stop  # each once, although some were repeated


def test_importing_phalanx_imports_no_torch() -> None:
    code = "import sys, phalanx; phalanx.topology; print('torch' in sys.modules)"
    assert run((sys.executable, "-c", code)).out == "False\n"
