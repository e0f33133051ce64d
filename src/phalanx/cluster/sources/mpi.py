"""Reads the variables of MPI launchers: mpirun of Open MPI 4 and 5, hydra of MPICH and Intel MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from phalanx.cluster.sources.task import BY_HAND, SchedulerTask, Variables, file_name
from phalanx.contract.ranks.placement import PartialPlacement


def task(environ: Mapping[str, str]) -> SchedulerTask | None:
    """Return the task of this process in an MPI job. None: no MPI launcher started it."""
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _open_mpi(environ)
    if "PMI_RANK" in environ or "PMI_SIZE" in environ or {"PMI_ID", "PMI_PORT"} <= environ.keys():
        return _hydra(environ)
    return None


def _open_mpi(environ: Mapping[str, str]) -> SchedulerTask:
    variables = _variables("Open MPI", environ)
    size = variables.size("OMPI_COMM_WORLD_SIZE")
    rank = variables.index("OMPI_COMM_WORLD_RANK", below=size)
    local_rank, local_size = _local(variables, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    nodes = None
    if variables.text("OMPI_MCA_orte_num_nodes") is not None:  # Open MPI 4 only
        nodes = variables.size("OMPI_MCA_orte_num_nodes", below=size + 1)
    name = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") or ""
    if name and (key := environ.get("OMPI_MCA_orte_precondition_transports")):
        # Version 4 names a job by 16 bits of host and pid; this key is random. It is a key, so only its digest is used.
        name += "-" + hashlib.sha256(key.encode()).hexdigest()[:12]
    return SchedulerTask(
        source="Open MPI",
        job=file_name("openmpi", name) if name else "",
        placement=PartialPlacement(
            rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_size, node_count=nodes
        ),
        variables=variables.found,
    )


def _hydra(environ: Mapping[str, str]) -> SchedulerTask:
    # Other I_MPI_* variables do not identify Intel MPI: modules and users set I_MPI_ROOT and the like everywhere.
    intel = any(name == "I_MPI_HYDRA_UUID" or name.startswith("I_MPI_INFO_") for name in environ)
    variables = _variables("Intel MPI" if intel else "MPICH", environ)
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        variables.text("PMI_ID"), variables.text("PMI_PORT")
        raise variables.refuse(
            "not of how many (PMI_RANK and PMI_SIZE are not set)", fix=f"mpiexec without -pmi-port, or {BY_HAND}"
        )
    size = variables.size("PMI_SIZE")
    rank = variables.index("PMI_RANK", below=size)
    local_rank, local_size = _local(variables, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", size)
    return SchedulerTask(
        source=variables.source,
        job=_hydra_job(variables),
        placement=PartialPlacement(rank=rank, world_size=size, local_rank=local_rank, local_world_size=local_size),
        variables=variables.found,
    )


def _hydra_job(variables: Variables) -> str:
    if name := variables.text("I_MPI_HYDRA_UUID"):
        return file_name("intelmpi", name)
    # MPICH gives no name. If it has started its proxies by srun, they have their own job step.
    if (
        variables.text("SLURM_EXTERNAL_LAUNCHER")
        and (job := variables.text("SLURM_JOB_ID"))
        and (step := variables.text("SLURM_STEP_ID"))
    ):
        restarts = variables.text("SLURM_RESTART_COUNT")
        cluster = variables.text("SLURM_CLUSTER_NAME") or ""
        return file_name("mpich", cluster, f"{job}.{step}", f"r{restarts}" if restarts else "")
    return ""


def _local(variables: Variables, rank: str, count: str, size: int) -> tuple[int, int]:
    """Return the rank among the tasks on this node, and their number. Default: 0 of 1."""
    if variables.text(rank) is None and variables.text(count) is None:
        return 0, 1
    local_size = variables.size(count, below=size + 1)
    return variables.index(rank, below=local_size), local_size


def _variables(source: str, environ: Mapping[str, str]) -> Variables:
    return Variables(source, environ, fix=f"phalanx run … right under mpirun, or without its help, {BY_HAND}")
