"""Runs have names and metadata: `--name`, prefixes, `ps`, `logs`, metadata.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.kit.cli import phalanx, start

# The rank that fails waits for the other one, which would be ended.
SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
for step in range(3):
    print("step", step, "rank", rank)
print("warning", rank, file=sys.stderr)
if "--fail" in sys.argv:
    if rank == "1":
        while not os.path.exists(__file__ + ".0"):
            time.sleep(0.01)
        raise ValueError("boom")
    sys.stdout.flush()
    open(__file__ + ".0", "w").close()
"""


TRAINING = """
import phalanx

def train(run):
    run.print("training")

if __name__ == "__main__":
    phalanx.main(train, hyperparameters={"lr": 0.2, "momentum": 0.9})
"""


def recorded(name: str) -> dict[str, Any]:
    listed = (json.loads(line) for line in phalanx("ps", "--all", "--json").out.splitlines())
    return next(run["metadata"] for run in listed if run["id"] == name)  # type: ignore[no-any-return]


RESTARTED = """
import os, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "attempt", attempt, "\x1b[31mred\x1b]0;title\x07", end="", flush=True)
print("waiting", attempt, rank, file=sys.stderr, flush=True)
while attempt == "1" and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("!", flush=True)
if attempt == "0" and rank == "1":
    while not os.path.exists(sys.argv[1] + ".0"):  # the other rank would be ended
        time.sleep(0.01)
    sys.exit(3)
open(sys.argv[1] + ".0", "w").close()
"""


def test_logs_follow_a_live_run_until_it_ends(tmp_path: Path) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(RESTARTED)
    run = start("run", "-g", "2", "--name", "live", "--max-restarts", "1", str(script), str(go))
    run.wait_for("rank 1 attempt 0")
    follower = start("logs", "-f", "li")
    follower.wait_for("[1] rank 1 attempt 0 red!")
    run.wait_for("waiting 1 1")
    assert "rank 1 attempt 1" in phalanx("logs", "live").out  # also a line that has no end yet
    go.write_text("")
    assert follower.wait() == 0
    assert run.wait() == 0
    lines = follower.out.splitlines()
    assert sorted(lines) == sorted(
        [f"[{rank}] rank {rank} attempt {attempt} red!" for rank in (0, 1) for attempt in (0, 1)]
        + [line for line in lines if line.startswith("--- attempt") or "waiting" in line]
    )
    assert "--- attempt 1 ---" in lines


def test_a_script_gives_its_hyperparameters(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    done = phalanx("run", "-g", "2", "--cpu", "--name", "given", "--param", "tag=a b", str(script), "--lr", "0.1")
    assert done.code == 0, done.err
    found = recorded("given")
    assert found["hyperparameters"] == {"lr": 0.2, "tag": "a b", "momentum": 0.9}
    assert (found["script"], found["git"], found["notes"]) == (str(script), None, [])
    assert set(found["versions"]) >= {"phalanx", "python", "torch"}


def test_a_git_that_hangs_does_not_hold_a_run_up(tmp_path: Path) -> None:
    script, git = tmp_path / "train.py", tmp_path / "bin" / "git"
    script.write_text(SCRIPT)
    (tmp_path / ".git").mkdir()
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec sleep 1000\n")
    git.chmod(0o700)
    done = phalanx("run", "--name", "slow", str(script), env={"PATH": f"{git.parent}:{os.environ['PATH']}"})
    assert done.code == 0
    found = recorded("slow")
    assert (found["git"], found["notes"]) == (None, ["the run ended before git answered"])
    assert "there is no rank 9: slow has rank 0\n" in phalanx("logs", "slow", "-r", "9").err


def test_a_run_has_a_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = phalanx("run", "-g", "2", "--name", "exp", str(script), "--lr", "0.1")
    assert first.err.startswith("phalanx: exp: 2 ranks, output in ")
    second = phalanx("run", "-g", "2", "--name", "exp", str(script), "--fail")
    assert second.code == 1
    listed = phalanx("ps", "--all").out.splitlines()
    assert "train.py --lr 0.1" in listed[1]
    assert "train.py --fail" in listed[2]
    assert "rank 1 failed: ValueError: boom" in listed[2]
    assert [line.split()[0] for line in phalanx("ps", "exp.", "exp.1").out.splitlines()] == ["RUN", "exp", "exp.2"]
    assert (phalanx("ps", "exp.2", "--json").out.count("\n"), phalanx("ps", "other").code) == (1, 2)
    assert "fix: phalanx ps --forget exp" in phalanx("ps", "exp", "--forget").err
    assert phalanx("why", "ex").out.startswith("exp.2: failed (1)")
    assert phalanx("why", "exp.1").out.startswith("exp: done")
    steps = [f"[{rank}] step {step} rank {rank}" for rank in (0, 1) for step in range(3)]
    shown = phalanx("logs", "exp.1")
    assert shown.out.splitlines() == [*steps[:3], "[0] warning 0", *steps[3:], "[1] warning 1"]
    newest = phalanx("logs", "-r", "1", "--tail", "1")
    assert (newest.out, newest.err) == ("step 2 rank 1\nValueError: boom\n", "phalanx: exp.2 (failed (1))\n")
    assert phalanx("logs", "exp", "--stream", "stdout", "-r", "0-1", "-f").out.splitlines() == steps
    missing = phalanx("logs", "exp", "-r", "0,2-3")
    assert (missing.code, "there is no rank 3: exp.2 has ranks 0-1" in missing.err) == (2, True)
    refused = phalanx("ps", "--forget", "exp")
    assert (refused.code, "2 runs are called exp\n  exp.1\n  exp.2\n" in refused.err) == (2, True)
    assert phalanx("ps", "--forget", "exp.1").out == "forgot exp\n"
