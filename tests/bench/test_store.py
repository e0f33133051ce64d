"""`phalanx bench store`: how it evaluates samples, and one small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.store import benchmark
from benchmarks.store.benchmark import GateRow, GateSample, rows, target
from tests.kit.cli import phalanx

GROUP = benchmark._GATE


def test_rounds_are_compared_in_pairs() -> None:
    samples = [GateSample("a", "s", gate=False, round=number, value=value) for number, value in enumerate((1.0, 2, 8))]
    samples += [GateSample("a", "s", gate=True, round=number, value=value) for number, value in enumerate((1.5, 2, 4))]
    samples += [GateSample("a", "s", gate=True, round=3, value=9.0)]  # without its counterpart
    samples += [GateSample("b", "s", gate=True, round=0, value=None, failure="boom")]
    assert rows(samples) == [
        GateRow("a", "s", 3, 2.0, 2.0, 1.0, 0.5, 1.5),
        GateRow("b", "s", 0, None, None, None, None, None),
    ]


def test_what_else_a_token_costs_does_not_count() -> None:
    values = {(benchmark._GROUP, False): 10.0, (benchmark._GROUP, True): 15.0}
    values |= {(benchmark._FORMED, False): 1.0, (benchmark._FORMED, True): 1.5}
    samples = [GateSample(what, "s", gate, round=0, value=value) for (what, gate), value in values.items()]
    (row,) = rows(benchmark.with_gate_only(samples))
    assert (row.what, row.without, row.with_gate, row.ratio) == (GROUP, 10.0, 10.5, 1.05)
    assert benchmark.with_gate_only(samples[1:]) == [], "a round without its pair"


@pytest.mark.parametrize(
    ("what", "ranks", "ratio", "met"),
    [
        (GROUP, 64, 1.05, True),
        (GROUP, 64, 1.06, False),
        (GROUP, 64, None, None),
        (GROUP, 8, 1.0, None),
        ("other", 64, 1.0, None),
    ],
)
def test_the_target(what: str, ranks: int, ratio: float | None, met: bool | None) -> None:
    assert target([GateRow(what, "s", 5, 1.0, 1.0, ratio, ratio, ratio)], ranks).met is met


def test_no_rank_is_refused() -> None:
    done = phalanx("bench", "store", "--ranks", "0")
    assert done.code == 2
    assert "--ranks" in done.err


@pytest.mark.extended
def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    words = ("--ranks", "2", "--repeat", "1", "--clients", "1", "--seconds", "0.2", "--json", str(path))
    done = phalanx("bench", "store", *words, timeout=300)
    assert done.code == 0, done.err
    samples = json.loads(path.read_text())["samples"]
    assert [sample["failure"] for sample in samples] == [""] * 8
    assert {sample["gate"] for sample in samples} == {False, True}
    assert all(sample["value"] > 0 for sample in samples)
