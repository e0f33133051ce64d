"""Counters of the out-of-memory killer, on file trees like those of both versions of cgroups."""

from __future__ import annotations

import os
import time
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
        (MemoryKills(0, 1), MemoryKills(0, 2), "possibly for memory"),
    ],
)
def test_out_of_memory_kills_are_described(before: MemoryKills, after: MemoryKills, words: str) -> None:
    cause = after.since(before)
    assert words in cause
    assert bool(cause) == bool(words)


def test_a_kill_for_memory_explains_the_workers_that_die_with_it_and_no_later_one() -> None:
    kills, now = [MemoryKills(0, 3)], [0.0]
    watch = out_of_memory.MemoryKillWatch(lambda: kills[0], lambda: now[0])
    assert watch.latest(7) == ""
    kills[0] = MemoryKills(1, 4, 1 << 30)
    assert "too much memory (limit 1.0 GiB)" in watch.latest(7)
    now[0] += 1.0
    assert "too much memory" in watch.latest(7)  # another one of the same moment
    now[0] += 60.0
    assert watch.latest(7) == ""


@pytest.mark.parametrize(
    ("in_log", "words"), [(True, out_of_memory.PROCESS), (False, ""), (None, out_of_memory.MACHINE)]
)
def test_a_kill_elsewhere_on_the_machine_is_the_cause_only_if_the_kernel_log_says_so(
    in_log: bool | None, words: str
) -> None:
    kills = [MemoryKills(0, 3)]
    asked: list[int] = []

    def asks(pid: int) -> bool | None:
        asked.append(pid)
        return in_log

    watch = out_of_memory.MemoryKillWatch(lambda: kills[0], lambda: 0.0, asks)
    kills[0] = MemoryKills(0, 4)
    assert watch.latest(7) == words
    assert asked == [7]


@pytest.mark.parametrize(
    ("pid", "ago", "text", "found"),
    [
        (71, 0, "Memory cgroup out of memory: Killed process 71 (python) total-vm:1kB", True),
        (71, 0, "Out of memory: Killed process 71 (python) total-vm:1kB", True),
        (7, 0, "Out of memory: Killed process 71 (python) total-vm:1kB", False),
        (71, 1000, "Out of memory: Killed process 71 (python) total-vm:1kB", False),  # an earlier process with this pid
        (71, 0, "python invoked oom-killer: gfp_mask=0xcc0 71", False),
    ],
)
def test_the_kernel_log_names_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, ago: int, text: str, found: bool
) -> None:
    monkeypatch.setattr(out_of_memory, "_FIRST_PID_NAMESPACE", os.stat(tmp_path).st_ino)
    log = tmp_path / "kmsg"
    log.write_text(f"3,1,{int((time.monotonic() - ago) * 1e6)},-;{text}")
    assert out_of_memory.in_kernel_log(pid, str(log), str(tmp_path)) is found


def test_a_kernel_log_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert out_of_memory.in_kernel_log(7, str(tmp_path / "none")) is None
    assert out_of_memory.in_kernel_log(7, namespace=str(tmp_path)) is None  # pids here are not those of the log
