"""A rank that dies between the updates of one step: the others have made a part of it, so none has a committed step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cli import Env, Result, phalanx, warm_environment

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "several_updates.py")


def trained(folder: Path, how: str, ranks: int, env: Env, *fault: str) -> Result:
    folder.mkdir()
    done = phalanx("run", "-g", str(ranks), "--cpu", SCRIPT, str(folder), how, *fault, env=env, timeout=150)
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize(
    ("how", "ranks"), [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.extended)]
)
def test_a_rank_that_dies_between_the_updates_of_a_step_costs_that_step(tmp_path: Path, how: str, ranks: int) -> None:
    with warm_environment("torch._dynamo") as env:
        trained(tmp_path / "undisturbed", how, ranks, env)
        done = trained(tmp_path / "killed", how, ranks, env, "5", "1")
    for rank in range(ranks):
        ends = [(tmp_path / name / f"end.{rank}").read_text() for name in ("undisturbed", "killed")]
        assert ends[0] == ends[1]
        assert (tmp_path / "killed" / f"begun.{rank}").read_text().split() == ["0", "5"]
    assert "no step lost" in done.err
