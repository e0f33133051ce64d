"""`phalanx why`: for a live run, a finished one, and a job that phalanx did not start."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.places import script
from tests.kit.cli import phalanx, start, until
from tests.kit.lab import Lab, Slurm
from tests.watch.finished_run import left, record_at

SCRIPT = script("outsider.py")


def test_a_live_run_and_a_killed_one(tmp_path: Path) -> None:
    env = {"PHALANX_HOME": str(tmp_path)}
    with start("run", "-g", "2", "--fresh", "--cpu", SCRIPT, env=env) as job:
        job.wait_for("here", count=2)
        result = phalanx("why", "--stacks", env=env)
        assert result.code == 0, result.err  # no rank waits for anything
        assert "ranks 0, 1: sleeping at outsider.py:10 in linger" in result.out
        assert result.out.count(f'File "{SCRIPT}", line 10 in linger') == 2
        facts = json.loads(phalanx("why", "--json", env=env).out)
        assert [rank["process"]["state"] for rank in facts["evidence"]["ranks"]] == ["S", "S"]
        assert facts["verdicts"] == []
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    result = phalanx("why", env=env)
    assert result.code == 1
    assert f"its agent (process {job.pid}) was killed" in result.out
    assert "ranks 0, 1 were running" in result.out


def test_a_run_without_ranks_yet(tmp_path: Path) -> None:
    """There is always an answer, even for a run that has just started."""
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.02)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {"PHALANX_HOME": str(tmp_path / "home"), "PYTHONPATH": path}
    with start("run", "-g", "1", "--cpu", "--no-warm", "--preload", "slow", SCRIPT, env=env) as job:
        until(lambda: [*(tmp_path / "home" / "runs").glob("*/run.json")], 60, "the run to be listed")
        result = phalanx("why", env=env)
        assert result.code == 1, result.err
        assert "cannot be asked: none of its ranks has started" in result.err
        assert "in a moment" in result.err.splitlines()[-1]
        (tmp_path / "go").touch()
        job.wait_for("here")
        assert phalanx("why", env=env).code == 0


@pytest.mark.smoke
def test_a_run_that_failed(tmp_path: Path) -> None:
    env = {"PHALANX_HOME": str(tmp_path)}
    assert phalanx("run", "-g", "2", "--fresh", "--cpu", SCRIPT, "fails", env=env).code == 1
    result = phalanx("why", env=env)
    assert result.code == 1
    assert "rank 1 failed: ValueError: no such sample" in result.out
    assert "outsider.py:14 in fail" in result.out
    facts = json.loads(phalanx("why", "--json", env=env).out)
    assert facts["first"] == "rank 1 failed: ValueError: no such sample"
    assert {event["event"] for event in facts["events"]} >= {"worker-started", "worker-exited", "worker-failed"}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("code", "preempted", "answer"),
    [(0, False, 0), (130, False, 0), (143, False, 0), (75, True, 0), (75, False, 1), (3, False, 1)],
)
def test_the_exit_code_is_1_only_if_something_is_wrong(tmp_path: Path, code: int, preempted: bool, answer: int) -> None:
    """A run that its user has stopped, or that the scheduler has preempted, has not failed."""
    record = left("ended", [], code=code, where=tmp_path / "runs")
    record_at(record, preempted=preempted)
    result = phalanx("why", "ended", env={"PHALANX_HOME": str(tmp_path)})
    assert result.code == answer, result.out + result.err


@pytest.mark.smoke
def test_runs_that_do_not_exist(tmp_path: Path) -> None:
    env = {"PHALANX_HOME": str(tmp_path)}
    for words, seen in (
        ((), "no runs yet"),
        (("nobody",), "no run called nobody is known here"),
        (("--pid", "4194304"), "there is no process 4194304 here"),
        (("--slurm", "x"), "a job is a number"),
        (("this", "--pid", "1"), "this and --pid or --slurm are two different jobs"),
    ):
        result = phalanx("why", *words, env=env)
        assert (result.code, seen in result.err) == (2, True), result.err


def test_a_job_of_another_launcher() -> None:
    """A launcher and its ranks, one of them below another process; processes that ranks have started are not ranks."""
    launcher = (
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, 'RANK': str(rank)})"
        " for rank in range(2)]\n"
        "[rank.wait() for rank in ranks]\n"
    )
    with start(words=(sys.executable, "-c", launcher, SCRIPT)) as job:
        job.wait_for("here", count=2)
        result = phalanx("why", "--pid", str(job.pid))
    assert result.code == 0, result.err
    assert "ranks 0, 1: sleeping at outsider.py:10 in linger" in result.out


def test_a_slurm_job(lab: Lab, slurm: Slurm) -> None:
    """On two nodes, asked from a third: each node checks its own."""
    words = ("srun", "-N2", "-n3", "-J", "outsider", sys.executable, SCRIPT)
    with lab[0].start(words=words, env=slurm.env) as job:
        job.wait_for("here", count=3)
        listed = lab[0].run(words=("squeue", "--noheader", "--name=outsider", "--format=%A"), env=slurm.env)
        result = lab[2].run("why", "--slurm", listed.out.strip(), env=slurm.env)
        job.signal(signal.SIGTERM)
        job.wait()
    assert result.code == 0, result.err
    assert "ranks 0-2: sleeping at outsider.py:10 in linger" in result.out
