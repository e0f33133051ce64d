"""`run.keep` before `run.wrap` in a sharded training: shards are restored when the models are sharded, the rest before.

Otherwise each rank would receive, and hold, the state of all shards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import Env, phalanx, warm_environment

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("sharded")]
SCRIPT = str(Path(__file__).parents[1] / "scripts" / "kept_first.py")


@pytest.fixture(scope="module")
def env() -> Any:
    with warm_environment("torch.distributed.checkpoint", "torch.distributed.fsdp") as env:
        yield env


def trained(env: Env, folder: Path, how: str, ranks: int, step: int) -> tuple[list[Any], Any]:
    """Return what each start of `train` had restored, and the end: the same on all ranks."""
    folder.mkdir()
    options = ("--snapshot-every", "1") if how == "fsdp" else ("--snapshot-every", "off")
    done = phalanx("run", "-g", str(ranks), "--cpu", *options, SCRIPT, str(folder), how, str(step), env=env)
    assert done.code == 0, done.err
    begun = [(folder / f"begun.{rank}").read_text().splitlines() for rank in range(ranks)]
    ends = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]
    assert all(one == begun[0] for one in begun)
    assert all(one == ends[0] for one in ends)
    return [json.loads(line) for line in begun[0]], ends[0]


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_shards_wait_for_sharded_models_and_all_else_does_not(tmp_path: Path, env: Env, how: str, ranks: int) -> None:
    _, undisturbed = trained(env, tmp_path / "undisturbed", how, ranks, -1)
    begun, end = trained(env, tmp_path / "disturbed", how, ranks, 3)
    (_, count, bias, _, _), *_ = begun[0]
    assert count == 0
    later = [one + 3.0 for one in bias]
    waits = [3, 3, pytest.approx(later), 0, []]
    assert begun[1] == [waits, waits, [3, 3, pytest.approx(later), 3, [True] * 4]]
    assert end == undisturbed
