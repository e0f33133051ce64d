"""`phalanx bench checkpoint`: what it makes of times, and one small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.bench.checkpoint import ASYNC, COPY, OURS, SAVE, Row, Stall, main, rows, target
from phalanx.errors import OptionError
from tests.kit.cli import phalanx


def took(way: str, size: int, first: float, *times: float) -> list[Stall]:
    return [Stall(way, size, number, time, 2 * time, number == 0) for number, time in enumerate((first, *times))]


def test_medians_without_the_first() -> None:
    found = rows([*took(COPY, 64, 9.0, 0.1, 0.3, 0.2), *took(OURS, 64, 5.0, 0.25, 0.9, 0.1), *took(COPY, 8, 1.0)])
    assert found == [
        Row(COPY, 8, 1.0, 1.0, 2.0, 1.0),
        Row(COPY, 64, 0.2, 9.0, 0.4, 1.0),
        Row(OURS, 64, 0.25, 5.0, 0.5, 1.25),
    ]


@pytest.mark.parametrize(
    ("times", "met", "evidence"),
    [
        ({64: 0.15, 512: 0.10}, True, "1.50 at 64 MiB, 1.00 at 512 MiB"),
        ({64: 0.10, 512: 0.16}, False, "1.00 at 64 MiB, 1.60 at 512 MiB"),
        ({}, None, "not part of this run"),
    ],
)
def test_the_promise(times: dict[int, float], met: bool | None, evidence: str) -> None:
    stalls = [one for size in (64, 512) for one in took(COPY, size, 1.0, 0.1)]
    stalls += [one for size, time in times.items() for one in took(OURS, size, 9.0, time)]
    judged = target(rows(stalls))
    assert (judged.met, judged.evidence) == (met, evidence)


@pytest.mark.parametrize(
    "argv", [["--sizes", "0"], ["--sizes", "big"], ["--sizes", "99999999"], ["--rounds", "0"], ["--threads", "0"]]
)
def test_what_cannot_be_measured(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


def test_a_small_real_run(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"
    place = tmp_path / "place"
    place.mkdir()
    words = ("--sizes", "12", "--rounds", "2", "--folder", str(place), "--json", str(file))
    done = phalanx("bench", "checkpoint", *words, timeout=100)
    data = json.loads(file.read_text())
    # So small a state on a machine with other things to do proves nothing about the promise.
    assert done.code == (0 if data["targets"][0]["met"] else 1), done.err
    assert data["benchmark"] == "checkpoint"
    assert [(one["way"], one["round"]) for one in data["samples"]] == [
        (way, number) for number in range(3) for way in (COPY, OURS, SAVE, ASYNC)
    ]
    assert all(0 < one["stall"] <= one["written"] < done.seconds for one in data["samples"])
    assert [row["way"] for row in data["rows"]] == [COPY, OURS, SAVE, ASYNC]
    assert data["rows"][0]["copies"] == 1
    assert data["settings"] == {"sizes": [12], "rounds": 2, "threads": 1}
    assert "Training stands still" in done.out
    assert list(place.iterdir()) == []
