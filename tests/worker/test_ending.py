"""How groups end: with the right exit code, without messages from torch, and without waiting for other ranks."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.kit.cli import start, until
from tests.kit.imported import python
from tests.worker.ranks import ended, ranks

ENDING = str(Path(__file__).parent / "scripts" / "ending.py")


# "wrapped" runs in a new interpreter, which takes seconds. The others are forked from one that has imported torch.
WAYS = [pytest.param(way, marks=pytest.mark.imported) for way in ("uneven", "again", "adopted", "destroyed", "fork")]


@pytest.mark.parametrize("way", [pytest.param("wrapped", marks=pytest.mark.extended), *WAYS])
def test_good_ends(way: str) -> None:
    jobs = ranks(2, ENDING, way)
    ended(jobs)
    for rank, job in enumerate(jobs):
        assert f"end {rank}" in job.out
        assert job.out.count("closed") == (way == "fork")  # the forked child closes nothing


@pytest.mark.imported
def test_one_process_ends_like_many() -> None:
    text = (
        "from phalanx.worker.process_group.group import WorkerProcessGroup\n"
        "WorkerProcessGroup.join(device='cpu').before_close(lambda: print('closed'))\n"
    )
    result = python("-c", text)
    assert (result.code, result.out, result.err) == (0, "closed\n", "")


FAILURES = """
import contextlib, sys
from phalanx.worker.process_group import closing, group as module

def watched(failed, destroy=closing._destroy):
    seen.append(failed)
    destroy(failed)

def end(error):
    if error is not None:
        raise error

closing._destroy = watched
exits = (SystemExit(), SystemExit(0), SystemExit(1), SystemExit("no data"))
for error in (None, *exits, ValueError(), KeyboardInterrupt()):
    seen = []
    with contextlib.suppress(BaseException), module.WorkerProcessGroup.join("gloo", device="cpu"):
        end(error)
    with contextlib.suppress(BaseException):
        group = module.WorkerProcessGroup.join("gloo", device="cpu")
        try:
            end(error)
        finally:
            group.close()
    print(repr(error), *seen)
"""


@pytest.mark.imported
def test_what_counts_as_a_failure() -> None:
    """Tests `with` and `finally: group.close()`. In a separate process, because a failed group is not released."""
    result = python("-c", FAILURES)
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "None False False",
        "SystemExit() False False",
        "SystemExit(0) False False",
        "SystemExit(1) True True",
        "SystemExit('no data') True True",
        "ValueError() True True",
        "KeyboardInterrupt() True True",
    ]


@pytest.mark.imported
def test_a_group_that_cannot_be_closed_fails_the_rank() -> None:
    text = (
        "from phalanx.worker.process_group.group import WorkerProcessGroup\n"
        "class Full(WorkerProcessGroup):\n"
        "    def close(self, *, failed=False):\n"
        "        super().close(failed=failed)\n"
        "        raise OSError('no space left')\n"
        "Full.join(device='cpu')\n"
        "print('the last line')\n"
    )
    result = python("-c", text)
    assert (result.code, result.out) == (1, "the last line\n")
    assert "OSError: no space left" in result.err


@pytest.mark.imported
@pytest.mark.parametrize(
    ("way", "code", "seen"),
    [
        ("exception", 1, "ValueError: rank 1 has had enough"),
        ("within", 1, "ValueError: rank 1 has had enough"),
        ("exit", 3, ""),
    ],
)
def test_one_leaves_and_the_others_know(way: str, code: int, seen: str) -> None:
    jobs = ranks(2, ENDING, way)
    assert [job.wait() for job in jobs] == [1, code]
    assert (seen in jobs[1].err) if seen else jobs[1].err == ""
    assert "peer lost, rank 1 has ended" in jobs[0].err
    assert "destroy_process_group" not in jobs[0].err + jobs[1].err


@pytest.mark.imported
@pytest.mark.parametrize(("way", "code"), [("pending", 1), ("pending finally", 1), ("pending exit", 3)])
def test_no_rank_waits_for_what_cannot_come(way: str, code: int) -> None:
    jobs = ranks(2, ENDING, way)
    assert jobs[1].wait() == code
    assert ("ValueError: rank 1 has had enough" in jobs[1].err) == (code == 1)


@pytest.mark.imported
def test_a_signal_ends_a_rank_that_waits_in_a_collective() -> None:
    jobs = ranks(3, ENDING, "stuck")
    for job in jobs:
        job.wait_for("ready")
    jobs[2].signal(signal.SIGTERM)
    assert jobs[2].wait() == -signal.SIGTERM
    assert jobs[2].err == ""
    # Another rank that waits for the third one gets the error too.
    assert jobs[0].wait() == 1
    assert "peer lost, rank 2 has ended" in jobs[0].err
    # So does a rank that does something else.
    jobs[1].signal(signal.SIGINT)
    assert jobs[1].wait() in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in jobs[1].err
    assert not any("destroy_process_group" in job.err for job in jobs)


@pytest.mark.warmed
def test_the_first_cause_under_phalanx_run() -> None:
    job = start("run", "--cpu", "-g", "2", ENDING, "exception")
    assert job.wait() == 1
    assert "ValueError: rank 1 has had enough" in job.err
    assert re.search(r"rank 1\b.*failed|failed.*rank 1", job.err), job.err
    until(lambda: job.drained(1))
