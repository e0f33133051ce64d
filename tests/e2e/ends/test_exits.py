"""Ranks that do not end with the last line of their script: named, awaited, and ended if they hang forever."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.e2e.places import script
from tests.kit.cli import start
from tests.kit.handle import Handle

LAST = re.compile(r"last line ([\d.]+)")


def begin(how: str, folder: Path, *args: str, options: tuple[str, ...] = ()) -> tuple[Handle, float]:
    """Start a run; return it, and the time of rank 1's last line."""
    job = start("run", "-g", "2", "--cpu", *options, script("ends_late.py"), how, str(folder), *args)
    return job, float(job.wait_for(LAST)[0][1])


@pytest.mark.warmed
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("thread", r'it waits for its thread "uploader" \(ends_late\.py:\d+ in work\)'),
        ("atexit", r"it is in its atexit function work \(ends_late\.py:\d+ in work\)"),
        ("child", r"it is in its atexit function _exit_function .*; its child processes: \d+ "),
        ("busy", r"it is in the teardown of the interpreter \(ends_late\.py:\d+ in __del__\)"),
    ],
)
def test_a_rank_that_works_at_exit_is_named_and_waited_for(how: str, expected: str, tmp_path: Path) -> None:
    job, last = begin(how, tmp_path)
    job.wait_for(re.compile(rf"rank 1 ran its last line \d+ s ago and has not ended: {expected}"))
    while time.time() - last < 14:  # one that hangs is ended after 10 s
        assert job.process.poll() is None
        time.sleep(0.5)
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert job.err.count("has not ended") == 1
    assert "SIGKILL" not in job.err


WAYS = [
    pytest.param((), id="cold"),
    pytest.param(("--fresh",), id="fresh"),
    pytest.param((), id="warm", marks=pytest.mark.warmed),
]


@pytest.mark.parametrize("options", WAYS)
def test_a_rank_that_hangs_in_the_teardown_is_ended(options: tuple[str, ...], tmp_path: Path) -> None:
    job, last = begin("teardown", tmp_path, options=("--max-restarts", "1", *options))
    assert job.wait() == 0
    assert time.time() - last < 60  # ended after 10 s
    assert "it is in the teardown of the interpreter (ends_late.py:" in job.err
    assert re.search(r"rank 1 has hung in the teardown of the interpreter for \d+ s without using the CPU", job.err)
    assert "it counts as exit code 0" in job.err
    assert len(LAST.findall(job.out)) == 1  # it is not a failure


@pytest.mark.smoke
@pytest.mark.warmed
def test_a_rank_that_failed_before_it_hung_counts_as_failed(tmp_path: Path) -> None:
    job, _ = begin("teardown", tmp_path, "1")
    assert job.wait() == 1
    assert "it counts as exit code 1" in job.err
    assert "RuntimeError: on purpose" in job.err
