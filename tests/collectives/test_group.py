"""phalanx's groups with everything that torch builds on groups, and their names in every script."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d as c10d

from phalanx.collectives.registration import register
from tests.collectives.ranks import ROOT, program

_ALSO_PLAIN = [
    "ddp",
    "ddp_sparse",
    "objects",
    "works",
    "asked_twice",
    "left",
    "forms",
    "numbers",
    "refused",
    "mismatched",
    "left_early",
    "ended_differently",
    "averaged",
    "lost_in_ddp",
]
_USES = [*_ALSO_PLAIN, "aborted", "ddp_join", "zero", "fsdp", "dtensor", "functional", "compiled"]


@cache
def _tried(plain: bool) -> dict[str, str]:
    output = program("uses", *(("--plain", *_ALSO_PLAIN) if plain else _USES), well=False)
    return dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)


@pytest.mark.extended
@pytest.mark.xdist_group("collectives")
@pytest.mark.parametrize("use", _USES)
def test_collectives_work_on_shared_memory(use: str) -> None:
    assert _tried(plain=False)[use] == "good"


@pytest.mark.extended
@pytest.mark.xdist_group("collectives")
@pytest.mark.parametrize("use", _ALSO_PLAIN)
def test_collectives_work_without_the_native_part(use: str) -> None:
    assert _tried(plain=True)[use] == "good"


_NAMES = """
import sys
before = set(sys.modules)
import torch
import torch.distributed as dist
ours = sorted(name for name in sys.modules if "phalanx" in name)
print(" ".join(ours))
for name in (None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "shm", "cpu:shm"):
    dist.init_process_group(name, rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.ones(2))
    group = dist.group.WORLD
    print(name, type(group).__name__, group.name(), group._get_sequence_number_for_group() > 0)
    dist.destroy_process_group()
try:
    dist.init_process_group("cpu:shm,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
except dist.DistBackendError as error:
    print(error)
"""


def test_a_torch_that_has_changed_is_imported_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d.Backend, "_plugins")
    register()


@pytest.mark.parametrize("debug", ["OFF", pytest.param("DETAIL", marks=pytest.mark.extended)])
def test_scripts_that_do_not_know_phalanx_have_the_names(tmp_path: Path, debug: str) -> None:
    metadata = tmp_path / "phalanx_try-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: phalanx_try\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nours = _phalanx_backend:register\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    env = {**os.environ, "PYTHONPATH": paths, "TORCH_DISTRIBUTED_DEBUG": debug, "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run([sys.executable, "-c", _NAMES], env=env, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "_phalanx_backend",  # not part of the package: a script may have its own phalanx.py
        "None ProcessGroup gloo True",
        "gloo ProcessGroup gloo True",
        "cpu:gloo ProcessGroup gloo True",
        "cpu:gloo,cuda:gloo ProcessGroup gloo True",
        "shm EngineProcessGroup shm True",
        "cpu:shm EngineProcessGroup shm True",
        '"cpu:shm,cuda:nccl": shm cannot be combined with other backends',
        '  fix: init_process_group("shm") for CPU tensors, or "cpu:gloo,cuda:nccl"',
    ]


def test_the_names_are_in_the_package() -> None:
    assert '[project.entry-points."torch.backends"]' in (ROOT / "pyproject.toml").read_text()
