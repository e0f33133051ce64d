"""In a Slurm allocation without tasks, `phalanx run` replaces itself by an `srun` of itself with one task per node."""

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

# Settings for the tasks of the batch script: srun would divide the devices, all of which our one task must see.
_OF_TASKS = (
    "SLURM_NTASKS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
)


def hand_over(
    allocation: Allocation, argv: Sequence[str], environ: Mapping[str, str], *, workers_given: bool
) -> NoReturn:
    """Replace this process by srun, so that Slurm's signals reach srun, which forwards them to all tasks."""
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None:
        raise LaunchError(
            f"this is an allocation of {len(allocation.hosts)} nodes, but srun was not found",
            fix="phalanx run --standalone … runs on this node only",
        )
    kept = {name: value for name, value in environ.items() if name not in _OF_TASKS}
    # In the environment of all tasks, not on a command line.
    kept.setdefault(TOKEN, tokens.new())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(srun, words(allocation, argv, workers_given=workers_given), kept)  # noqa: S606


def words(allocation: Allocation, argv: Sequence[str], *, workers_given: bool) -> list[str]:
    """Return the srun command: one task per node with all its devices, and as many ranks as the job has tasks there."""
    count = len(allocation.hosts)
    workers = []
    if not workers_given and any(tasks > 1 for tasks in allocation.tasks):
        workers = ["-g", ",".join(map(str, allocation.tasks))]
    return [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        sys.executable,
        "-P",  # ignore a phalanx.py in the current folder
        "-m",
        "phalanx",
        "run",
        *workers,
        *argv,
    ]
