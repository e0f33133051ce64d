"""The processes of a run that does not end: whether they still compute, and where they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys

from tests.kit.proc import command, every


def inside(folder: str, launcher: int = 0) -> list[int]:
    """Return the processes that work in a folder, except the launcher: the ranks of a run, and their children."""
    found = []
    for process in every():
        with contextlib.suppress(OSError):
            if (
                not process.dead
                and process.pid != launcher
                and os.path.realpath(f"/proc/{process.pid}/cwd") == os.path.realpath(folder)
            ):
                found.append(process.pid)
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time that they and their reaped children have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def dump(pids: list[int]) -> str:
    """Return the stacks from py-spy, with C frames; without py-spy, the kernel function in which each waits."""
    spy = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    return "\n".join(f"--- process {pid}: {command(pid)}\n{_one(pid, spy)}" for pid in pids)


def _one(pid: int, spy: str | None) -> str:
    if spy:
        for native in (("--native",), ()):
            words = [spy, "dump", *native, "--pid", str(pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                shown = subprocess.run(words, capture_output=True, text=True, timeout=20)
                if shown.returncode == 0:
                    return shown.stdout
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        return f"waits in {file.read() or 'user space'}"
    return "gone"
