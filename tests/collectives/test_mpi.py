"""`dist.init_process_group("mpi")` with PyTorch's ordinary wheel: under mpirun, alone, and where it cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n")


def start(words: Sequence[object], **env: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [*map(str, words)], env=surroundings, capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL
    )


def test_everything_under_mpirun() -> None:
    done = start([*MPIRUN, 3, sys.executable, "-W", "ignore", SCRIPTS / "everything.py", "mpi"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank .*", done.stdout)) == [
        f"rank {rank} of 3: all as it should be, by mpi" for rank in range(3)
    ]


def test_who_waits_for_ever_is_told_so_and_ends_the_job() -> None:
    done = start([*MPIRUN, 2, sys.executable, "-W", "ignore", SCRIPTS / "waiting.py"])
    assert done.returncode != 0
    assert (
        "rank 0: Late: all_reduce timed out: it waited 1 s for other ranks, and MPI does not tell for which"
        in done.stdout
    )
    assert "rank 0: Aborted" in done.stdout, done.stdout
    assert "MPI_ABORT was invoked on rank 0" in done.stderr


def test_alone_and_without_mpi4py() -> None:
    """Without mpirun it is a world of one; where mpi4py is not installed it says what to type."""
    done = start([sys.executable, "-W", "ignore", SCRIPTS / "alone.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rank 0 of 1: 3.0",
        "Refused: the backend mpi needs mpi4py, which is not installed",
        "  fix: pip install 'phalanx[mpi]'",
    ]
