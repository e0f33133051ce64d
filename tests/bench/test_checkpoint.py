"""`phalanx bench checkpoint`: how it evaluates times, and one small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training.checkpoint import (
    ASYNC,
    COPY,
    OURS,
    SAVE,
    CheckpointRow,
    SaveSample,
    main,
    rows,
    target,
)
from phalanx.errors import OptionError
from tests.kit.cli import phalanx


def took(
    method: str, size: int, first: float, *times: float, ranks: int = 1, step: float | None = None
) -> list[SaveSample]:
    return [
        SaveSample(method, ranks, size, number, time, 2 * time, number == 0, step, 0.5)
        for number, time in enumerate((first, *times))
    ]


def test_medians_without_the_first() -> None:
    found = rows(
        [
            *took(COPY, 64, 9.0, 0.1, 0.3, 0.2),
            *took(OURS, 64, 5.0, 0.25, 0.9, 0.1, step=0.6),
            *took(COPY, 64, 9.0, 0.4, ranks=2),
            *took(OURS, 64, 9.0, 0.2, ranks=2),
            *took(COPY, 8, 1.0),
        ]
    )
    assert found == [
        CheckpointRow(COPY, 1, 8, 1.0, 1.0, 2.0, 1.0, None),
        CheckpointRow(COPY, 1, 64, 0.2, 9.0, 0.4, 1.0, None),
        CheckpointRow(OURS, 1, 64, 0.25, 5.0, 0.5, 1.25, 1.2),
        CheckpointRow(COPY, 2, 64, 0.4, 9.0, 0.8, 1.0, None),
        CheckpointRow(OURS, 2, 64, 0.2, 9.0, 0.4, 0.5, None),
    ]


@pytest.mark.parametrize(
    ("times", "met", "evidence"),
    [
        ({64: 0.15, 512: 0.10}, True, "1.50 at 64 MiB on 1 rank, 1.00 at 512 MiB on 1 rank"),
        ({64: 0.10, 512: 0.16}, False, "1.00 at 64 MiB on 1 rank, 1.60 at 512 MiB on 1 rank"),
        ({}, None, "not part of this run"),
    ],
)
def test_the_promise(times: dict[int, float], met: bool | None, evidence: str) -> None:
    stalls = [one for size in (64, 512) for one in took(COPY, size, 1.0, 0.1)]
    stalls += [one for size, time in times.items() for one in took(OURS, size, 9.0, time)]
    judged = target(rows(stalls))
    assert (judged.met, judged.evidence) == (met, evidence)


@pytest.mark.parametrize(
    "argv",
    [
        *(["--sizes", "0"], ["--sizes", "big"], ["--sizes", "99999999"]),
        *(["--ranks", "0"], ["--rounds", "0"], ["--threads", "-1"]),
    ],
)
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


@pytest.mark.extended
def test_a_small_real_run(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"
    place = tmp_path / "place"
    place.mkdir()
    words = ("--sizes", "12", "--rounds", "3", "--folder", str(place), "--json", str(file))
    done = phalanx("bench", "checkpoint", *words, timeout=150)
    data = json.loads(file.read_text())
    # A small state on a busy machine says nothing about the target.
    assert done.code == (0 if data["targets"][0]["met"] else 1), done.err
    assert data["benchmark"] == "checkpoint"
    every, ours = (COPY, OURS, SAVE, ASYNC), (COPY, OURS)
    assert [(one["ranks"], one["method"], one["round"]) for one in data["samples"]] == [
        (ranks, method, number) for ranks in (1, 2) for number in range(4) for method in (every if number < 3 else ours)
    ]
    assert all(0 < one["stall"] <= one["written"] < done.seconds for one in data["samples"])
    assert any(one["step"] for one in data["samples"])
    assert [(row["ranks"], row["method"]) for row in data["rows"]] == [
        (ranks, method) for ranks in (1, 2) for method in every
    ]
    assert data["rows"][0]["copies"] == 1
    assert data["settings"] == {"sizes": [12], "ranks": [1, 2], "rounds": 3, "threads": 0}
    assert "A checkpoint blocks training" in done.out
    assert list(place.iterdir()) == []
