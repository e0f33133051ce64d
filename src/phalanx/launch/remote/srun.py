"""In a Slurm allocation without tasks yet, `phalanx run` becomes an `srun` of itself: one task a node."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from phalanx.cluster.sources.task import Allocation
from phalanx.contract.variables import TOKEN
from phalanx.control import tokens
from phalanx.errors import LaunchError

# They are about the tasks of the batch script, and would make srun share out devices that one task is to see.
_OF_TASKS = (
    "SLURM_NTASKS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
)


def hand_over(
    allocation: Allocation, argv: Sequence[str], environ: Mapping[str, str], *, workers_told: bool
) -> NoReturn:
    """Never returns: Slurm's signals then reach srun, which hands them to all tasks."""
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None:
        raise LaunchError(
            f"this is an allocation of {len(allocation.hosts)} nodes, but there is no srun to start tasks with",
            fix="phalanx run --standalone … runs on this node alone",
        )
    kept = {name: value for name, value in environ.items() if name not in _OF_TASKS}
    # All tasks have it from here, and it is on no command line.
    kept.setdefault(TOKEN, tokens.new())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(srun, words(allocation, argv, workers_told=workers_told), kept)


def words(allocation: Allocation, argv: Sequence[str], *, workers_told: bool) -> list[str]:
    """One task a node, which sees all that the job has there; where the job asks for several tasks, as many ranks."""
    count = len(allocation.hosts)
    workers = []
    if not workers_told and any(tasks > 1 for tasks in allocation.tasks):
        workers = ["-g", ",".join(map(str, allocation.tasks))]
    return [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        sys.executable,
        "-P",  # a phalanx.py in the current folder is not ours
        "-m",
        "phalanx",
        "run",
        *workers,
        *argv,
    ]
