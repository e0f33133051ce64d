"""Checkpoints of several real ranks, and of savers that die: each script imports torch once and forks its ranks."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.cli import python, run

SCRIPTS = Path(__file__).parent / "scripts"
STAGES = (2, 3, 1, 2, 3, 1)  # ranks


def test_another_world_size_and_strategy(tmp_path: Path) -> None:
    done = python(str(SCRIPTS / "checkpoint_ranks.py"), str(tmp_path), "resume", timeout=150)
    assert done.code == 0, done.err
    folder = tmp_path / "resume"

    def seen(number: int, what: str, rank: int) -> dict[str, torch.Tensor]:
        return torch.load(folder / f"{number}-{what}-{rank}.pt", weights_only=True)

    # Buffers differ from rank to rank, and rank 0's are kept.
    assert not torch.equal(seen(0, "out", 0)["model.1.running_mean"], seen(0, "out", 1)["model.1.running_mean"])
    for number in range(1, len(STAGES)):
        left = seen(number - 1, "out", 0)
        assert {name.rpartition(".")[2] for name in left} >= {"weight", "running_mean", "exp_avg", "exp_avg_sq", "step"}
        for rank in range(STAGES[number]):
            found = seen(number, "in", rank)
            assert found.keys() == left.keys()
            assert [name for name in left if not torch.equal(found[name], left[name])] == [], (number, rank)
        assert not torch.equal(seen(number, "out", 0)["model.0.weight"], left["model.0.weight"])
    for number in range(len(STAGES)):
        out = {k.removeprefix("model."): v for k, v in seen(number, "out", 0).items() if k.startswith("model.")}
        for exported in (
            load_file(folder / f"{number}.safetensors"),
            torch.load(folder / f"{number}.pt", weights_only=True),
        ):
            assert exported.keys() == out.keys()
            assert all(torch.equal(exported[name], out[name]) for name in out)


def test_ranks_agree(tmp_path: Path) -> None:
    """One that cannot write, one that dies, folders that are not the same, saves that are skipped."""
    plays = ("one_fails", "one_dies", "not_shared", "skips")
    done = python(str(SCRIPTS / "checkpoint_ranks.py"), str(tmp_path), *plays, timeout=100)
    assert done.code == 0, done.err
    assert done.out.split("\n")[:-1] == [f"{play} done" for play in plays]


@pytest.mark.parametrize("when", ["points", "moments"])
def test_killed_savers(tmp_path: Path, when: str) -> None:
    done = python(str(SCRIPTS / "checkpoint_killed.py"), str(tmp_path), when, timeout=150)
    assert done.code == 0, done.err
    number = int(done.out.split()[0])
    assert number >= (40 if when == "points" else 20)


def test_a_full_disk(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare, "unshare is needed for a small disk of the test's own"
    assert os.geteuid() == 0, "only root can mount one"
    mount = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$2" "$3" "$1"'
    words = ("sh", "-c", mount, "sh", str(tmp_path), sys.executable, str(SCRIPTS / "checkpoint_full.py"))
    done = run((unshare, "-m", *words), timeout=100)
    assert done.code == 0, done.err
    assert done.out == "as it should be\n"
