"""`dist.init_process_group("mpi")` with PyTorch's ordinary wheel: under mpirun, alone, and if it is not possible."""

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
        [*map(str, words)], env=surroundings, capture_output=True, text=True, timeout=350, stdin=subprocess.DEVNULL
    )


def test_everything_under_mpirun_and_then_one_does_not_come() -> None:
    words = (sys.executable, "-W", "ignore", SCRIPTS / "everything.py", "mpi", "1", "sleeps")
    done = start([*MPIRUN, 3, *words])
    for rank in range(3):
        assert f"rank {rank} of 3: all as it should be, by mpi" in done.stdout, done.stdout + done.stderr
    # A collective ends after its timeout. MPI cannot cancel it, so the ranks that leave abort the job, and mpirun ends
    # the rank that sleeps. The exit status shows it: mpirun sometimes fails to print its message about MPI_ABORT.
    late = "CollectiveTimeout: all_reduce timed out: it waited 2 s for other ranks; MPI does not report which"
    assert re.search(rf"rank [02] after \d+\.\d s: {late}", done.stdout), done.stdout + done.stderr
    assert re.search(r"rank [02] after 0\.\d s: GroupAborted", done.stdout), done.stdout + done.stderr
    assert done.returncode == 1


def test_alone_and_without_mpi4py() -> None:
    """Without mpirun it is a world of one, or refused under torchrun. If mpi4py is missing, the error has the fix."""
    done = start([sys.executable, "-W", "ignore", SCRIPTS / "alone.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rank 0 of 1: 3.0",
        "CallRefused: the backend mpi: MPI has started a single process, but WORLD_SIZE is 2",
        "  fix: mpirun -n 2 python …, or another backend: shm, gloo",
        "CallRefused: the backend mpi needs mpi4py, which is not installed",
        "  fix: pip install 'phalanx[mpi]'",
    ]
