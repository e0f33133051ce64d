"""Checkpoints of several real ranks, and of savers that die: each script forks its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.cli import Result
from tests.kit.imported import python

pytestmark = pytest.mark.imported
SCRIPTS = Path(__file__).parents[1] / "scripts"
STAGES = (2, 3, 1, 2, 3, 1)  # ranks


@pytest.mark.extended
def test_another_world_size_and_strategy(tmp_path: Path) -> None:
    done = python(str(SCRIPTS / "checkpoint_ranks.py"), str(tmp_path), "resume", timeout=150)
    assert done.code == 0, done.err
    folder = tmp_path / "resume"

    def seen(number: int, what: str, rank: int) -> dict[str, torch.Tensor]:
        return torch.load(folder / f"{number}-{what}-{rank}.pt", weights_only=True)

    mean = "model.body.1.running_mean"
    # Buffers differ from rank to rank, and rank 0's are kept.
    assert not torch.equal(seen(0, "out", 0)[mean], seen(0, "out", 1)[mean])
    for number in range(1, len(STAGES)):
        left = seen(number - 1, "out", 0)
        assert {name.rpartition(".")[2] for name in left} >= {
            *("weight", "running_mean", "exp_avg", "exp_avg_sq", "step", "momentum_buffer")
        }
        for rank in range(STAGES[number]):
            found = seen(number, "in", rank)
            assert found.keys() == left.keys()
            assert [name for name in left if not torch.equal(found[name], left[name])] == [], (number, rank)
        assert not torch.equal(seen(number, "out", 0)["model.body.0.weight"], left["model.body.0.weight"])
    for number in range(len(STAGES)):
        out = {k.removeprefix("model."): v for k, v in seen(number, "out", 0).items() if k.startswith("model.")}
        for exported in (
            load_file(folder / f"{number}.safetensors"),
            torch.load(folder / f"{number}.pt", weights_only=True),
        ):
            assert exported.keys() == out.keys()
            assert all(torch.equal(exported[name], out[name]) for name in out)


def test_ranks_agree(tmp_path: Path) -> None:
    """One that cannot write, one that dies, one with bad files, folders that differ or are not accessible, saves that
    are skipped.
    """
    scenarios = ("one_fails", "one_dies", "one_is_bad", "no_entry", "not_shared", "skips")
    done = python(str(SCRIPTS / "checkpoint_ranks.py"), str(tmp_path), *scenarios, timeout=100)
    assert done.code == 0, done.err
    assert done.out.split("\n")[:-1] == [f"{scenario} done" for scenario in scenarios]


MOUNTED = """
import ctypes, os, runpy, subprocess, sys
CLONE_NEWNS = 0x20000
size, script, folder = sys.argv[1:4]
assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0, "no mount namespace"
subprocess.run(("mount", "--make-rprivate", "/"), check=True)
subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder), check=True)
sys.argv[:] = sys.argv[2:]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


def on_a_separate_disk(folder: Path, size: str, *words: str) -> Result:
    """Runs a script with its folder in memory: full when it is, and never slow."""
    assert os.geteuid() == 0, "only root can mount one"
    script, *rest = words
    return python("-c", MOUNTED, size, str(SCRIPTS / script), str(folder), *rest, timeout=150)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("when", "least"),
    [
        pytest.param("points", 40, marks=pytest.mark.extended),
        ("moments", 20),
        pytest.param("ranks", 24, marks=pytest.mark.extended),
    ],
)
def test_killed_savers(tmp_path: Path, when: str, least: int) -> None:
    # In memory: the result of a kill does not depend on the disk, but the duration of hundreds of fsyncs does.
    done = on_a_separate_disk(tmp_path, "256m", "checkpoint_killed.py", when)
    assert done.code == 0, done.err
    assert int(done.out.split()[0]) >= least


def test_a_full_disk(tmp_path: Path) -> None:
    done = on_a_separate_disk(tmp_path, "8m", "checkpoint_full.py")
    assert done.code == 0, done.err
    assert done.out == "as it should be\n"
