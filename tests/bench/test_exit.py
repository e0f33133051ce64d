"""`phalanx bench exit`: how it evaluates times, and one small real run."""

from __future__ import annotations

import json

import pytest

from benchmarks.launch.exit import ExitTimes, exit_times, target
from benchmarks.launch.results import LaunchCase, LaunchSample
from tests.kit.cli import phalanx


def test_only_the_time_after_the_last_line_counts() -> None:
    mine, other = LaunchCase("phalanx", "exit", 8), LaunchCase("torchrun", "exit", 8)
    samples = [
        LaunchSample(mine, 1, 2.0, 2.25),
        LaunchSample(mine, 2, 3.0, 3.5),
        LaunchSample(mine, 3, None, None, "boom"),
        LaunchSample(other, 1, 1.0, 4.0),
    ]
    found = exit_times(samples, "phalanx", 8)
    assert found == ExitTimes("phalanx", 8, (0.25, 0.5), ("boom",))
    assert found.text == "0.38 s (0.25..0.50), 1 failed"
    assert ExitTimes("phalanx", 8, (), ("boom",)).text == "failed: boom"


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (ExitTimes("phalanx", 8, (0.3, 0.39, 0.9)), True),
        (ExitTimes("phalanx", 8, (0.3, 0.4, 0.9)), False),
        (ExitTimes("phalanx", 8, (0.3,), ("boom",)), None),
        (ExitTimes("phalanx", 2, (0.3,)), None),
        (ExitTimes("warm", 8, (0.3,)), None),
    ],
)
def test_the_target(found: ExitTimes, met: bool | None) -> None:
    assert target([found]).met is met


@pytest.mark.extended
def test_a_small_run() -> None:
    done = phalanx("bench", "exit", "--ranks", "2", "--repeat", "1", "--contenders", "phalanx", "--json", timeout=120)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["exits"]
    assert found["failures"] == []
    assert 0 < found["times"][0] < 60
