"""`phalanx bench step`: how it evaluates times, and one small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training.step import StepRow, StepTimes, main, rows, targets
from phalanx.errors import OptionError
from tests.kit.cli import phalanx


def took(**seconds: tuple[float, ...]) -> list[StepTimes]:
    return [StepTimes("plain", name, times, "" if times else "boom") for name, times in seconds.items()]


def test_ratios_are_those_of_rounds() -> None:
    # The machine was slow in the second round, for both. That is not a difference between them.
    found = rows(took(raw=(0.010, 0.030, 0.010), phalanx=(0.011, 0.033, 0.011), accelerate=()))
    assert found == [
        StepRow("plain", "raw", 10.0, 1.0, 1.0, 1.0, 0.0),
        StepRow("plain", "phalanx", 11.0, 1.1, 1.1, 1.1, 0.0),
        StepRow("plain", "accelerate", None, None, None, None),
    ]


@pytest.mark.parametrize(
    ("phalanx_", "again", "met", "evidence"),
    [
        (1.005, 1.001, True, "1.0050"),
        (1.02, 1.001, False, "1.0200"),
        (1.02, 1.05, None, "too much noise to tell"),
        (0.9, 0.95, None, "too much noise to tell"),
        (1.02, None, False, "1.0200"),
        (None, 1.0, None, "not measured"),
    ],
)
def test_the_promise(phalanx_: float | None, again: float | None, met: bool | None, evidence: str) -> None:
    measured = took(raw=(1.0,), phalanx=(phalanx_,) if phalanx_ else ())
    if again is not None:
        measured += took(again=(again,))
    (judged,) = targets(rows(measured))
    assert judged.met is met
    assert evidence in judged.evidence


def test_what_the_spread_allows_to_say() -> None:
    def judged(*ratios: float) -> bool | None:
        (target,) = targets(rows(took(raw=(1.0,) * len(ratios), phalanx=ratios)))
        return target.met

    wide = (0.8, 0.9, 1.0, 1.1, 1.2)
    assert judged(*wide) is None
    assert judged(*(ratio + 0.5 for ratio in wide)) is False
    assert judged(*(1 + (ratio - 1) / 100 for ratio in wide)) is True
    assert judged(*wide * 2000) is True


@pytest.mark.parametrize(
    "argv",
    [
        ["--ranks", "0"],
        ["--steps", "6"],
        ["--contenders", "raw,horovod"],
        ["--contenders", "phalanx"],
        ["--cases", "odd"],
    ],
)
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


@pytest.mark.extended
def test_a_small_real_run(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    small = ("--rounds", "3", "--width", "8", "--layers", "1", "--batch", "4", "--cases", "data")
    done = phalanx("bench", "step", *small, "--json", str(file))
    # Three rounds of so small a step cannot show whether 1% is met, only that all loops ran.
    assert done.code in (0, 1), done.err
    data = json.loads(file.read_text())
    assert (data["benchmark"], data["settings"]["rounds"], data["settings"]["ranks"]) == ("step", 3, 2)
    assert [sample["contender"] for sample in data["samples"]][:3] == ["raw", "again", "phalanx"]
    for sample in data["samples"]:
        assert (sample["failure"], len(sample["seconds"])) == ("", 3)
        assert all(0 < seconds < done.seconds for seconds in sample["seconds"])
    assert all(row["ratio"] > 0 for row in data["rows"])
    assert len(data["targets"]) == 1
    assert "raw PyTorch DDP, again" in done.out
    assert "failed" not in done.out


def test_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main(["--cases", "plain", "--contenders", "raw,phalanx"], {}) == 1
    assert "exit code 1" in capfd.readouterr().out
