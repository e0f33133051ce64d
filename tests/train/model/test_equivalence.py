"""N ranks against one process of plain PyTorch, with the same global batches: the same loss curve."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import phalanx

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "curves.py")
pytestmark = pytest.mark.warmed
CASES = ("plain", "accumulate", "clip", "both", "adamw", "uneven", "uneven windows")
WAYS = [("ddp", 1), ("fsdp", 1), ("dp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)]
WAYS += [("hsdp", 1), ("hsdp", 2)]


def together(ranks: int) -> list[pytest.MarkDecorator]:
    """In one process of the tests: one launch covers all cases of a size. Two ranks are enough for `make test`."""
    return [pytest.mark.xdist_group(f"curves of {ranks}"), *([pytest.mark.extended] if ranks != 2 else [])]


@functools.cache
def curves(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "curves.json")
        done = phalanx("run", "-g", str(ranks), "--cpu", SCRIPT, str(file))
        assert done.code == 0, done.out + done.err
        found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("how", "ranks"), [pytest.param(*way, marks=together(way[1])) for way in WAYS])
def test_the_loss_curve(how: str, ranks: int, case: str) -> None:
    found = curves(ranks)
    ours, plain = found[how][case], found["reference"][case]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert ours["end"] == pytest.approx(plain["end"], rel=1e-4)


@pytest.mark.parametrize("case", [pytest.param(case, marks=together(4)) for case in CASES])
def test_replicas_of_shards_train_as_replicas_do(case: str) -> None:
    """Two replicas of two shards. Not all cases can be divided among four ranks like in one process."""
    found = curves(4)
    for what in ("losses", "norms", "end"):
        assert found["hsdp"][case][what] == pytest.approx(found["ddp"][case][what], rel=1e-4)


@pytest.mark.xdist_group("curves of 2")
def test_the_cases_can_tell_a_difference() -> None:
    """Errors would be visible: clipping changes the curve, and every curve changes."""
    plain = curves(2)["reference"]
    assert plain["clip"]["losses"] != pytest.approx(plain["plain"]["losses"], rel=1e-2)
    assert min(plain["clip"]["norms"]) > 0.05
    for case in CASES:
        assert plain[case]["losses"][0] != pytest.approx(plain[case]["losses"][-1], rel=1e-2)
