"""The examples and the demo, as the documentation says to run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.cli import phalanx

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_hello() -> None:
    result = phalanx("run", "-g", "4", "--cpu", str(EXAMPLES / "hello.py"))
    assert result.code == 0
    assert sorted(re.findall(r"rank (\d) of 4: the ranks add up to 6", result.out)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("spelling", ["--pass-local-rank", "--pass-local-rank=underscore"])
def test_the_old_way(spelling: str) -> None:
    result = phalanx("run", "-g", "2", "--cpu", spelling, str(EXAMPLES / "oldway.py"))
    assert sorted(re.findall(r"my local rank is (\d) of 2", result.out)) == ["0", "1"]


def test_demo() -> None:
    result = phalanx("demo", timeout=120)
    assert result.code == 0, result.err
    found = re.search(r"([\d.]+)% of points it has never seen", result.out)
    assert found is not None
    assert float(found[1]) > 97
    assert "rank 1 failed: RuntimeError: this rank has read a broken sample" in result.err
