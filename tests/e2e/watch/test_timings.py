"""Stragglers: equal ranks are not reported; one that computes longer is named, live and at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx import Job, launch
from phalanx.contract import events
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import TimingsQuery, TimingsReply
from phalanx.launcher.runs import run_folder
from tests.e2e.places import script
from tests.kit.cli import until, warm_environment

NOTHING = TimingsReply(ranks=(), late=(), table=())


def asked(job: Job) -> TimingsReply:
    """Return the answer of the agent, which has more data every second."""
    time.sleep(0.5)
    (run,) = (run for run in run_folder.all_runs(os.path.dirname(os.path.dirname(job.folder))) if run.alive)
    reply = control_socket.request(run, TimingsQuery(), TimingsReply, timeout=30)
    return reply if isinstance(reply, TimingsReply) else NOTHING  # it has not started measuring


def test_a_rank_that_computes_longer_is_named_and_equal_ones_are_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[TimingsReply] = []

    def equal() -> bool:
        found.append(asked(job))
        return sum(rank.samples >= 30 for rank in found[-1].ranks) == 3

    def uneven() -> bool:
        found.append(asked(job))
        return all(reply.late for reply in found[-6:])  # far enough from the limit, where the result may change

    with warm_environment("torch._dynamo") as env:
        variables = {name: str(value) for name, value in env.items()}
        with launch(script("uneven.py"), [str(tmp_path)], workers=3, cpu=True, env=variables) as job:
            until(lambda: "training" in job.logs(), 60, "the training to begin")
            until(equal, 90, "enough looks at three ranks")
            assert not any(timing.late for timing in found), found[-1]
            (tmp_path / "uneven").touch()
            until(uneven, 90, "one to be named")
            (tmp_path / "end").touch()
            assert job.wait(240) == 0
        for text in (found[-1].late[0], capfd.readouterr().err):
            assert "rank 2 is " in text
            assert "times slower in compute than the median" in text
        path = Path(job.folder, "events.jsonl")
        (event,) = [
            one
            for one in map(events.decode, path.read_bytes().splitlines())
            if isinstance(one, events.StepTimingReport)
        ]
        assert [pace.rank for pace in event.ranks] == [0, 1, 2]
        assert event.ranks[2].compute > 1.3 * event.ranks[0].compute
        assert event.ranks[2].waiting < event.ranks[0].waiting
