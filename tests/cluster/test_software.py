"""Versions, read from the names of folders."""

from __future__ import annotations

import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from phalanx.cluster import software


def test_versions_of_this_machine_are_those_that_pip_knows() -> None:
    found = software.versions()
    assert found["torch"] == metadata.version("torch")
    assert found["python"] == sys.version.split()[0]


def test_reading_versions_is_fast() -> None:
    def once() -> float:
        began = time.process_time()
        software.versions()
        return time.process_time() - began

    assert statistics.median(once() for _ in range(7)) < 0.02


def test_packages_that_are_installed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (
        first / "torch-2.13.0+cpu.dist-info",
        first / "nvidia_nccl_cu12-2.27.3.dist-info",
        first / "torch_geometric-2.6.dist-info",
        second / "torch-2.1.0.dist-info",
        second / "nvidia_nccl_cu13-2.28.0.dist-info",
    ):
        path.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(first), str(tmp_path / "none.zip"), str(second), str(first)])
    assert software.packages() == [
        ("nvidia-nccl-cu12", "2.27.3"),
        ("torch", "2.13.0+cpu"),
        ("nvidia-nccl-cu13", "2.28.0"),
        ("torch", "2.1.0"),
    ]
    found = software.versions()
    assert (found["torch"], found["nccl"]) == ("2.13.0+cpu", "2.28.0")


def test_torch_that_is_not_a_wheel_and_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "torch" not in software.versions()
    (tmp_path / "torch-2.9.0.egg-info").mkdir()
    (tmp_path / "torch-2.9.0.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    assert software.versions()["torch"] == "2.9.0"
