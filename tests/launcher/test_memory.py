"""Counters of the out-of-memory killer, on trees like those of the two versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launcher.telemetry import out_of_memory
from phalanx.launcher.telemetry.out_of_memory import MemoryKills


def tree(root: Path, cgroup: str, files: dict[str, str], machine: int = 0) -> tuple[str, str]:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/vmstat").write_text(f"nr_free_pages 1\noom_kill {machine}\n")
    for name, text in files.items():
        path = root / "cg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root / "proc"), str(root / "cg")


def test_version_2(tmp_path: Path) -> None:
    files = {"job/memory.events": "low 0\noom 3\noom_kill 2\n", "job/memory.max": "1073741824\n"}
    assert out_of_memory.read(*tree(tmp_path, "0::/job\n", files)) == MemoryKills(2, 0, 1 << 30)


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    files = {"job/memory.events": "oom_kill 0\n", "job/memory.max": "max\n"}
    assert out_of_memory.read(*tree(tmp_path, "0::/job\n", files, machine=4)) == MemoryKills(0, 4, None)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        "memory/a/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert out_of_memory.read(*tree(tmp_path, "4:memory:/a\n0::/\n", files)) == MemoryKills(5, 0, None)


def test_nothing_can_be_read(tmp_path: Path) -> None:
    assert out_of_memory.read(str(tmp_path), str(tmp_path)) == MemoryKills(0, 0, None)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (MemoryKills(0, 0), MemoryKills(0, 0), ""),
        (MemoryKills(1, 7), MemoryKills(2, 8, 3 << 30), "too much memory (limit 3.0 GiB)"),
        (MemoryKills(0, 1), MemoryKills(0, 2), "the machine ran out of memory"),
    ],
)
def test_in_words(before: MemoryKills, after: MemoryKills, words: str) -> None:
    told = after.since(before)
    assert words in told
    assert bool(told) == bool(words)


def test_a_kill_for_memory_explains_the_workers_that_die_with_it_and_no_later_one() -> None:
    kills, now = [MemoryKills(0, 3)], [0.0]
    watch = out_of_memory.MemoryKillWatch(lambda: kills[0], lambda: now[0])
    assert watch.latest() == ""
    kills[0] = MemoryKills(1, 4, 1 << 30)
    assert "too much memory (limit 1.0 GiB)" in watch.latest()
    now[0] += 1.0
    assert "too much memory" in watch.latest()  # another one of the same moment
    now[0] += 60.0
    assert watch.latest() == ""
