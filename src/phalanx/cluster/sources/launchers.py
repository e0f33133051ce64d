"""Finds the scheduler that started this process."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cluster.sources import mpi, slurm
from phalanx.cluster.sources.task import Allocation, SchedulerTask


def find(environ: Mapping[str, str]) -> SchedulerTask | Allocation | None:
    """Return the task of the innermost scheduler: mpirun or a job step before the allocation around it."""
    if not _slurm_speaks_pmi(environ) and (task := mpi.task(environ)) is not None:
        return task
    return slurm.task(environ) or slurm.allocation(environ)


def _slurm_speaks_pmi(environ: Mapping[str, str]) -> bool:
    """Return whether the variables of MPICH come from srun: then they have the same values as its own."""
    if "OMPI_COMM_WORLD_RANK" in environ or "SLURM_STEP_ID" not in environ:
        return False
    # Only Slurm sets PMI_JOBID. A task can inherit these variables from the shell that started it; then they are stale.
    if "PMI_JOBID" in environ and "MPI_LOCALRANKID" not in environ:
        return True
    size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    rank = environ.get("SLURM_PROCID")
    return rank is not None and (environ.get("PMI_RANK"), environ.get("PMI_SIZE")) == (rank, size)
