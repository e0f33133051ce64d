"""Checks of limits, shared memory, disks, clocks and versions, from given facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.doctor import torch_build
from phalanx.doctor.checks import clock, disk, limits, shared_memory, versions
from phalanx.doctor.checks.clock import Offset
from phalanx.doctor.checks.disk import Disk
from phalanx.doctor.checks.limits import Limits
from phalanx.doctor.checks.shared_memory import SharedMemory
from phalanx.doctor.checks.versions import Versions
from phalanx.doctor.finding import worst
from tests.doctor.checks.expected import GIB, MIB, expect

FINE = Limits(files=4096, files_hard=None, locked=None, tasks=None)


@pytest.mark.parametrize(
    ("facts", "ranks", "level", "words"),
    [
        (FINE, 0, "green", ["4096 open files, any amount of locked memory"]),
        (replace(FINE, locked=8 * MIB), 8, "green", ["8 MiB of locked"]),
        (replace(FINE, files=1024), 8, "green", []),
        (replace(FINE, files=512), 0, "yellow", ["512 files; 1024 are needed", "limit of this shell"]),
        (replace(FINE, files=512, files_hard=512), 0, "yellow", ["hard limit of this login is 512"]),
        (replace(FINE, files=1024), 128, "red", ["1024 files; 2112 are needed for 128 ranks"]),
        (replace(FINE, files=32), 0, "red", ["may open 32 files"]),
        (replace(FINE, tasks=100), 0, "yellow", ["100 processes"]),
        (replace(FINE, group_tasks=100), 0, "yellow", ["100 more processes", "pids.max"]),
        (replace(FINE, group_tasks=3), 0, "red", ["3 more processes"]),
        (replace(FINE, locked=8 * MIB, rdma=("mlx5_0",)), 0, "yellow", ["lock 8 MiB", "mlx5_0"]),
        (replace(FINE, rdma=("mlx5_0",)), 0, "green", []),
    ],
)
def test_limits(facts: Limits, ranks: int, level: str, words: list[str]) -> None:
    expect(limits.judge(facts, ranks=ranks), level, *words)


@pytest.mark.parametrize(
    ("facts", "level", "brief_level"),
    [
        (SharedMemory(8 * GIB, 8 * GIB), "green", "green"),
        (SharedMemory(64 * MIB, 64 * MIB), "yellow", "green"),
        (SharedMemory(32 * MIB, 32 * MIB), "yellow", "yellow"),
        (SharedMemory(8 * GIB, 4 * MIB), "yellow", "yellow"),
        (SharedMemory(8 * GIB, 0), "red", "red"),
        (SharedMemory(trouble="No such file or directory"), "red", "red"),
    ],
)
def test_shared_memory(facts: SharedMemory, level: str, brief_level: str) -> None:
    expect(shared_memory.judge(facts), level, "/dev/shm")
    assert worst(shared_memory.judge(facts, brief=True)) == brief_level


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Disk("/a/b", "/a", total=GIB, free=GIB, inodes=9, free_inodes=9), "green", ["/a/b (in /a): 1 GiB free"]),
        (Disk("/a", "/a", total=GIB, free=GIB), "green", ["/a: 1 GiB free of 1 GiB"]),
        (Disk("/a", "/a", total=GIB, free=50 * MIB), "yellow", ["almost full: 50 MiB free of 1 GiB"]),
        (Disk("/a", "/a", total=GIB, free=0, trouble="No space left on device"), "red", ["is full: 0 B free"]),
        (Disk("/a", "/a", "Read-only file system", GIB, GIB), "red", ["cannot be written: Read-only file system"]),
        (Disk("/a", "/a", "Permission denied"), "red", ["cannot be written: Permission denied"]),
        (Disk("/a", "/a", "", GIB, GIB, 10000, 50), "yellow", ["only 50 free inodes of 10000"]),
        (Disk("/a", "/a", "No space left on device", GIB, GIB, 10000, 0), "red", ["has no free inodes"]),
    ],
)
def test_disk(facts: Disk, level: str, words: list[str]) -> None:
    expect(disk.judge(facts), level, *words)


@pytest.mark.parametrize(
    ("offsets", "level", "words"),
    [
        ({"a": Offset(0, 0), "b": Offset(0.002, 0.001)}, "green", ["within 2 ms"]),
        ({"a": Offset(0, 0), "b": Offset(2.0, 1.5)}, "green", []),  # uncertain: the answer took too long
        ({"a": Offset(0, 0), "b": Offset(2.0, 0.1)}, "yellow", ["b: the clock is 2 s ahead of"]),
        ({"a": Offset(0, 0), "b": Offset(-2.0, 0.1), "c": Offset(-2.1, 0.1)}, "yellow", ["a: the clock is 2 s ahead"]),
        ({"a": Offset(0, 0), "b": Offset(0, 0), "c": Offset(-900, 0.1)}, "red", ["c: the clock is 900 s behind"]),
    ],
)
def test_clock(offsets: dict[str, Offset], level: str, words: list[str]) -> None:
    expect(clock.judge(offsets), level, *words)
    assert clock.judge(dict(list(offsets.items())[:1])) == []


def test_the_clock_offset_is_that_of_the_quickest_answer() -> None:
    # Our clock shows 100 when theirs shows 90: ours is 10 s ahead.
    assert clock.best([(100, 95, 110), (100.0, 90.5, 101.0)]) == Offset(10.0, 0.5)
    assert clock.best([]) is None


TORCH = Versions("3.11.7", "0.1.0", "2.13.0+cu130", "13.0", packages=(("torch", "2.13.0+cu130"),))


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (TORCH, "green", ["phalanx 0.1.0, Python 3.11.7, torch 2.13.0+cu130, CUDA 13.0"]),
        (replace(TORCH, packages=(("nvidia-nccl-cu13", "2.28.9"),)), "green", ["NCCL 2.28.9"]),
        (replace(TORCH, packages=(("torch", "2.13.0"),)), "green", []),
        (replace(TORCH, torch=""), "red", ["torch is not installed"]),
        (
            replace(TORCH, packages=(("torch", "2.12.0"),)),
            "yellow",
            ["2.13.0+cu130 would be imported, but pip knows 2.12"],
        ),
        (replace(TORCH, packages=(("torch", "2.12.0"), ("torch", "2.13.0"))), "yellow", ["torch is installed 2 times"]),
        (
            replace(TORCH, packages=(("nvidia-nccl-cu12", "2.27"), ("nvidia-nccl-cu13", "2.28"))),
            "yellow",
            ["NCCL is installed 2 times: nvidia-nccl-cu12 2.27 and nvidia-nccl-cu13 2.28"],
        ),
        (replace(TORCH, cuda="", gpus=4), "yellow", ["4 NVIDIA GPUs", "built for the CPU"]),
        (replace(TORCH, gpus=4), "green", []),
    ],
)
def test_versions(facts: Versions, level: str, words: list[str]) -> None:
    expect(versions.judge(facts), level, *words)


def test_versions_of_nodes() -> None:
    expect(versions.compare({"a": TORCH, "b": TORCH}), "green")
    other = replace(TORCH, torch="2.12.0")
    expect(versions.compare({"a": TORCH, "b": other, "c": TORCH}), "red", "of torch (2.12.0: b; 2.13.0+cu130: a, c)")
    expect(versions.compare({"a": TORCH, "b": replace(TORCH, python="3.11.9")}), "green")
    expect(versions.compare({"a": TORCH, "b": replace(TORCH, python="3.12.1")}), "yellow", "3.11: a; 3.12: b")
    assert versions.compare({"a": TORCH}) == []


def test_version_file_is_read_not_run() -> None:
    text = (
        "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = '12.8'\nhip = None\nx = 1/0\n"
    )
    assert torch_build.assignments(text) == {"__version__": "2.13.0+cpu", "cuda": "12.8"}
