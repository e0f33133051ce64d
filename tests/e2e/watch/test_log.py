"""PHALANX_LOG: the log of phalanx itself."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.kit.cli import phalanx, warm_environment

SCRIPT = """
import logging
logging.getLogger("phalanx.worker").debug("only with PHALANX_LOG")
print(len(logging.getLogger("phalanx").handlers), "handlers")
"""


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["--fresh", "warm"])
def test_workers_log_to_their_standard_error(tmp_path: Path, way: str) -> None:
    """The fork server that they come from may have another environment."""
    script = tmp_path / "log.py"
    script.write_text(SCRIPT)
    words = ("run", "-g", "1", *([way] if way == "--fresh" else []), str(script))
    with warm_environment() if way == "warm" else nullcontext({}) as env:
        quiet = phalanx(*words, env=env)
        logged = phalanx(*words, env={**env, "PHALANX_LOG": "debug"})
    assert "0 handlers" in quiet.out
    assert "only with" not in quiet.out + quiet.err
    assert "1 handlers" in logged.out
    assert "DEBUG phalanx.worker: only with PHALANX_LOG" in logged.err


RECOVERING = """
import os, signal
import phalanx, torch
def train(run):
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model, opt)
    ddp = run.wrap(model)
    while run.steps < 3:
        loss = ddp(torch.ones(1, 2)).sum()
        run.backward(loss)
        run.step(opt, loss)
        if run.steps == 2 and run.group.rank == 1 and not run.group.generation:
            os.kill(os.getpid(), signal.SIGKILL)
phalanx.main(train)
"""


@pytest.mark.smoke
@pytest.mark.warmed
def test_the_log_shows_what_happens_in_a_recovery(tmp_path: Path) -> None:
    script = tmp_path / "recovering.py"
    script.write_text(RECOVERING)
    found = phalanx("run", "-g", "2", "--cpu", "--max-restarts", "1", str(script), env={"PHALANX_LOG": "debug"})
    assert found.code == 0, found.err
    lines = [line.partition(" DEBUG ")[2] for line in found.err.splitlines()]
    agent = [
        r"phalanx.launcher.agent.group_controller: attempt 0: generation 0, 2 ranks here",
        r"phalanx.launcher.workers.worker: rank 1, pid \d+: running, was starting",
        r"phalanx.launcher.workers.worker: rank 1, pid \d+: exited, was connected",
        r"phalanx.launcher.agent.agent: rank 1 failed: SIGKILL .*; decided: RegroupPlan",
    ]
    worker = [
        r"phalanx.train.elastic_loop: generation 0: rank 0 of 2",
        r"phalanx.worker.agent_channel: the agent sent Assignment",
        r"phalanx.train.elastic_loop: leaving generation 0 after step 2",
        r"phalanx.train.elastic_loop: generation 1: rank 0 of 2",
        r"phalanx.train.restoration: restored from another rank at step 2",
    ]
    for expected in (agent, worker):  # each in this order
        rest = iter(lines)
        assert [each for each in expected if not any(re.fullmatch(each, line) for line in rest)] == []


@pytest.mark.smoke
def test_an_unknown_level_is_refused() -> None:
    found = phalanx("ps", env={"PHALANX_LOG": "loud"})
    assert found.code == 2
    assert "PHALANX_LOG is 'loud', expected one of debug, info, warning, error" in found.err
