"""Ranks that are forked from one process, which has imported torch: a group costs no import.

A separate program, because a process that forks should have no threads: `python -m tests.collectives.<program>`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
Rank = Callable[[int, int, str], None]  # rank, ranks, path of a file store


def fork(ranks: int, work: Rank, limit: float = 120) -> list[int]:
    """Return the exit code of each rank. Errors are on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(work, rank, ranks, f"{folder}/store") for rank in range(ranks)]
        ends: dict[int, int] = {}
        until = time.monotonic() + limit
        while len(ends) < ranks:
            for pid in pids:
                if pid not in ends and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    ends[pid] = os.waitstatus_to_exitcode(done[1])
            if time.monotonic() > until:
                for pid in set(pids) - set(ends):
                    os.kill(pid, 9)
            time.sleep(0.002)
    return [ends[pid] for pid in pids]


def _forked(work: Rank, rank: int, ranks: int, store: str) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(rank, ranks, store)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def program(name: str, *arguments: str, well: bool = True, limit: float = 350) -> str:
    """Run a program and return its output. With `well`, it must succeed."""
    command = [sys.executable, "-m", f"tests.collectives.{name}", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
    if not well and done.returncode:
        sys.stderr.write(done.stderr[-8000:])
    assert done.returncode == 0 or not well, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
