"""`phalanx bench join`: how it evaluates times, and one small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.join.benchmark import JoinRow, JoinSample, main, rows, target
from phalanx.errors import OptionError
from tests.kit.cli import phalanx


def took(members: int, *times: float | None) -> list[JoinSample]:
    return [
        JoinSample(members, number, seconds, seconds, 1 << 20, seconds)
        if seconds is not None
        else JoinSample(members, number, failure="boom")
        for number, seconds in enumerate(times, 1)
    ]


def test_medians_and_growth() -> None:
    found = rows([*took(16, 0.1), *took(256, 0.5, 0.2, 0.3), *took(1024, 1.2), *took(4096, 9.6, None, 9.6)])
    assert [(row.members, row.seconds, row.failed) for row in found] == [
        (16, 0.1, 0),
        (256, 0.3, 0),
        (1024, 1.2, 0),
        (4096, 9.6, 1),
    ]
    assert [row.growth for row in found] == [None, 1.0, 1.0, pytest.approx(2.0, rel=0.01)]
    assert found[3].each == pytest.approx(2.3438)


@pytest.mark.parametrize(
    ("times", "met", "evidence"),
    [
        ((4.0, 5.0, 20.0), True, "5.00 s"),
        ((10.5,), False, "10.50 s"),
        ((4.0, None), None, "1 rounds failed"),
        ((), None, "not part of this run"),
    ],
)
def test_the_promise(times: tuple[float | None, ...], met: bool | None, evidence: str) -> None:
    judged = target(rows([*took(16, 0.1), *took(4096, *times)]))
    assert (judged.met, judged.evidence) == (met, evidence)


def test_what_failed_has_no_time() -> None:
    assert rows(took(16, None)) == [JoinRow(16, 1, None, None, None, None, None, None)]


@pytest.mark.parametrize("argv", [["--members", "0"], ["--members", "many"], ["--rounds", "0"]])
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


def test_a_small_real_run(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    done = phalanx("bench", "join", "--members", "16", "--rounds", "1", "--json", str(file))
    assert done.code == 0, done.err
    data = json.loads(file.read_text())
    (sample,) = data["samples"]
    assert (data["benchmark"], sample["members"], sample["round"], sample["failure"]) == ("join", 16, 1, "")
    assert 0 < sample["seconds"] < done.seconds
    assert 0 < sample["cpu"] < done.seconds
    assert 0 < sample["members_cpu"] < done.seconds
    assert 0 < sample["memory"] < 50 << 20
    (row,) = data["rows"]
    assert (row["members"], row["seconds"], row["failed"]) == (16, sample["seconds"], 0)
    assert data["targets"][0]["met"] is None
    assert data["settings"] == {"members": [16], "rounds": 1}
    assert "From the first call" in done.out
    assert done.err.count("\n") == 1


def test_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    # No process that it starts finds a Python interpreter.
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main(["--members", "2", "--rounds", "1"], {}) == 1
    assert "the leader ended with code 1" in capfd.readouterr().out
