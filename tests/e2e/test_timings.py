"""Stragglers: ranks that are alike are not told apart; one that computes longer is named, live and at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from phalanx.contract import events
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.runs import run_folder
from tests.e2e.places import script
from tests.kit.cli import stage, start, until


def asked(home: str) -> dict[str, Any]:
    """What the desk of the one run there says; it knows more every second."""
    time.sleep(0.5)
    (run,) = (run for run in run_folder.all_runs(home) if run.alive)
    reply = control_socket.request(run, {"ask": "timings"}, timeout=30)
    return reply if reply["is"] == "timings" else {"ranks": [], "late": []}  # it has not begun to look


def test_a_rank_that_computes_longer_is_named_and_equal_ones_are_not(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    def equal() -> bool:
        found.append(asked(home))
        return sum(rank["samples"] >= 30 for rank in found[-1]["ranks"]) == 3

    def uneven() -> bool:
        found.append(asked(home))
        return bool(found[-1]["late"])

    with stage("torch._dynamo") as env:
        home = str(env["PHALANX_HOME"])
        with start("run", "-g", "3", "--cpu", script("uneven.py"), str(tmp_path), env=env) as job:
            job.wait_for("training", timeout=60)
            until(equal, 90, "enough looks at three ranks")
            assert not any(said["late"] for said in found), found[-1]
            (tmp_path / "uneven").touch()
            until(uneven, 90, "one to be named")
            (tmp_path / "end").touch()
            assert job.wait(60) == 0, job.err
        for told in (found[-1]["late"][0], job.err):
            assert "rank 2 is " in told
            assert "times slower in compute than the median" in told
        (path,) = Path(home, "runs").glob("*/events.jsonl")
        (event,) = [
            one
            for one in map(events.decode, path.read_bytes().splitlines())
            if isinstance(one, events.StepTimingReport)
        ]
        assert [pace.rank for pace in event.ranks] == [0, 1, 2]
        assert event.ranks[2].compute > 1.3 * event.ranks[0].compute
        assert event.ranks[2].waiting < event.ranks[0].waiting
