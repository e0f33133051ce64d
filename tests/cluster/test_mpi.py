"""Relevant variables of MPI launchers, recorded under Open MPI 4.1 and 5.0, MPICH and Intel MPI."""

from __future__ import annotations

import pytest

from phalanx.cluster.sources import mpi
from phalanx.cluster.sources.launchers import find
from phalanx.cluster.sources.task import Allocation, SchedulerTask
from phalanx.errors import UsageError


def open_mpi4(rank: int, size: int, local_rank: int, local_size: int, nodes: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{size}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{local_rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{local_size}",
        "OMPI_COMM_WORLD_NODE_RANK": f"{local_rank}",
        "OMPI_UNIVERSE_SIZE": "4",
        "OMPI_MCA_ess_base_jobid": "4277862401",
        "OMPI_MCA_orte_num_nodes": f"{nodes}",
        "OMPI_MCA_orte_precondition_transports": "4f71d481f409689d-84d9104cb4e7bd3a",
        "PMIX_NAMESPACE": "4277862401",
        "PMIX_RANK": f"{rank}",
        "PMIX_ID": f"4277862401.{rank}",
    }


def open_mpi5(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{size}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{local_rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{local_size}",
        "OMPI_COMM_WORLD_NODE_RANK": f"{local_rank}",
        "OMPI_MCA_num_procs": "2",
        "PMIX_NAMESPACE": "prterun-node1-1600@1",
        "PMIX_RANK": f"{rank}",
        "PRTE_LAUNCHED": "1",
    }


def mpich(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": f"{local_size}",
        "MPI_LOCALRANKID": f"{local_rank}",
        "PMI_FD": "9",
        "PMI_HOSTNAME": "node1",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{size}",
    }


def intel(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "HYDRA_BSTRAP_LAUNCHER": "ssh",
        "HYDRA_BSTRAP_NODE_ID": "0",
        "I_MPI_HYDRA_UUID": "6b050000-078f-0d89-4960-0600fd3f755c",
        "I_MPI_INFO_NP": "1",
        "MPI_LOCALNRANKS": f"{local_size}",
        "MPI_LOCALRANKID": f"{local_rank}",
        "PMI_FD": "9",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{size}",
    }


OPEN_MPI_4 = ("Open MPI", "openmpi-4277862401-a89add97db25")
OPEN_MPI_5 = ("Open MPI", "openmpi-prterun-node1-1600-1")
INTEL = ("Intel MPI", "intelmpi-6b050000-078f-0d89-4960-0600fd3f755c")
MPICH = ("MPICH", "")

# environment, source and job, (rank, size, local rank, local size, nodes), one rank per node
TASKS = [
    (open_mpi4(0, 2, 0, 2, 1), OPEN_MPI_4, (0, 2, 0, 2, 1), False),
    (open_mpi4(1, 2, 1, 2, 1), OPEN_MPI_4, (1, 2, 1, 2, 1), False),
    (open_mpi4(1, 2, 0, 1, 2), OPEN_MPI_4, (1, 2, 0, 1, 2), True),  # --map-by ppr:1:node
    # alone on this node, but the other node has two ranks
    (open_mpi4(2, 3, 0, 1, 2), OPEN_MPI_4, (2, 3, 0, 1, 2), False),
    (open_mpi4(0, 1, 0, 1, 1), OPEN_MPI_4, (0, 1, 0, 1, 1), True),
    (open_mpi5(1, 2, 1, 2), OPEN_MPI_5, (1, 2, 1, 2, None), False),
    (open_mpi5(1, 2, 0, 1), OPEN_MPI_5, (1, 2, 0, 1, None), None),
    (open_mpi5(0, 1, 0, 1), OPEN_MPI_5, (0, 1, 0, 1, None), True),
    (mpich(1, 2, 1, 2), MPICH, (1, 2, 1, 2, None), False),
    (mpich(0, 3, 0, 2), MPICH, (0, 3, 0, 2, None), False),
    (mpich(2, 3, 0, 1), MPICH, (2, 3, 0, 1, None), None),
    (intel(1, 2, 1, 2), INTEL, (1, 2, 1, 2, None), False),
    (intel(0, 2, 0, 1), INTEL, (0, 2, 0, 1, None), None),
    # a loaded module, not a launcher
    (mpich(0, 2, 0, 2) | {"I_MPI_ROOT": "/opt/intel"}, MPICH, (0, 2, 0, 2, None), False),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, MPICH, (1, 2, 0, 1, None), None),  # no variable about this node
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("Open MPI", ""), (1, 2, 0, 1, None), None),
]


@pytest.mark.parametrize(("environ", "names", "place", "alone"), TASKS)
def test_tasks(
    environ: dict[str, str], names: tuple[str, str], place: tuple[int | None, ...], alone: bool | None
) -> None:
    task = mpi.task(environ)
    assert task is not None
    assert (task.source, task.job) == names
    found = task.placement
    numbers = (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_count)
    assert numbers == place
    assert task.one_a_node is alone
    assert (found.node_rank, task.hosts) == (None, ())
    assert task.variables.items() <= environ.items()
    assert find(environ) == task


def test_the_key_of_a_job_is_not_shown() -> None:
    environ = open_mpi4(0, 2, 0, 2, 1)
    task = mpi.task(environ)
    assert task is not None
    assert environ["OMPI_MCA_orte_precondition_transports"] not in f"{task}"
    other = mpi.task(environ | {"OMPI_MCA_orte_precondition_transports": "c2d2d07014f91370-9e75310faba47d7d"})
    assert other is not None
    assert other.job != task.job  # the number alone repeats with host and pid


@pytest.mark.parametrize("environ", [{}, {"PMIX_RANK": "0"}, {"OMPI_MCA_btl": "tcp,self"}, {"I_MPI_FABRICS": "shm"}])
def test_no_launcher(environ: dict[str, str]) -> None:
    assert mpi.task(environ) is None


BROKEN = [
    (open_mpi5(0, 2, 0, 2), "OMPI_COMM_WORLD_SIZE", None, "OMPI_COMM_WORLD_SIZE is not set"),
    (open_mpi5(0, 2, 0, 2), "OMPI_COMM_WORLD_RANK", "", "OMPI_COMM_WORLD_RANK is not set"),
    (open_mpi5(0, 2, 0, 2), "OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_RANK=2 cannot be"),
    (open_mpi5(0, 2, 0, 2), "OMPI_COMM_WORLD_LOCAL_SIZE", None, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
    (open_mpi5(0, 2, 0, 2), "OMPI_COMM_WORLD_LOCAL_SIZE", "3", "OMPI_COMM_WORLD_LOCAL_SIZE=3 cannot be"),
    (open_mpi4(0, 2, 0, 1, 2), "OMPI_MCA_orte_num_nodes", "3", "OMPI_MCA_orte_num_nodes=3 cannot be"),
    (mpich(0, 2, 0, 2), "PMI_SIZE", None, "PMI_SIZE is not set"),
    (mpich(0, 2, 0, 2), "PMI_RANK", None, "PMI_RANK is not set"),
    (mpich(0, 2, 0, 2), "PMI_SIZE", "two", "PMI_SIZE='two' is not a number"),
    (mpich(0, 2, 0, 2), "MPI_LOCALRANKID", "2", "MPI_LOCALRANKID=2 cannot be"),
]


@pytest.mark.parametrize(("environ", "name", "value", "what"), BROKEN)
def test_broken_variables_are_named(environ: dict[str, str], name: str, value: str | None, what: str) -> None:
    del environ[name]
    with pytest.raises(UsageError) as refusal:
        find(environ if value is None else environ | {name: value})
    assert what in refusal.value.what
    assert "--master" in refusal.value.fix


def test_a_rank_that_does_not_know_of_how_many() -> None:
    """With mpiexec -pmi-port, a rank has to ask for the size."""
    environ = {"PMI_ID": "1", "PMI_PORT": "node1:42061", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    with pytest.raises(UsageError, match="not of how many") as refusal:
        find(environ)
    assert "without -pmi-port" in refusal.value.fix


# An allocation around the launcher: sbatch -N2 --ntasks-per-node=2
BATCH = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "19",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "node1",
}


def slurm_step(step: int, rank: int, size: int) -> dict[str, str]:
    """Return the variables of a step with one task per node. MPI launchers start their own helpers like this."""
    return BATCH | {
        "SLURM_STEP_ID": f"{step}",
        "SLURM_STEP_NUM_TASKS": f"{size}",
        "SLURM_NTASKS": f"{size}",
        "SLURM_STEP_NUM_NODES": f"{size}",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_STEP_NODELIST": f"node[1-{size}]",
        "SLURM_PROCID": f"{rank}",
        "SLURM_NODEID": f"{rank}",
    }


HYDRA = {"SLURM_EXTERNAL_LAUNCHER": "1"}

# name, environment, (source, job, rank, size)
INSIDE = [
    ("mpirun, on the script's own node", BATCH | open_mpi4(0, 3, 0, 2, 2), (*OPEN_MPI_4, 0, 3)),
    ("mpirun, behind its servant", slurm_step(1, 0, 1) | open_mpi4(2, 3, 0, 1, 2), (*OPEN_MPI_4, 2, 3)),
    ("hydra on two nodes", slurm_step(3, 0, 2) | HYDRA | mpich(1, 3, 1, 2), ("MPICH", "mpich-lab-19.3", 1, 3)),
    ("hydra on one", slurm_step(5, 0, 1) | HYDRA | mpich(1, 2, 1, 2), ("MPICH", "mpich-lab-19.5", 1, 2)),
    ("hydra by ssh", BATCH | mpich(0, 2, 0, 1), ("MPICH", "", 0, 2)),
    ("Intel MPI", slurm_step(4, 0, 2) | intel(1, 4, 1, 2), (*INTEL, 1, 4)),
    # Slurm and Hydra agree
    ("hydra -ppn 1", slurm_step(2, 1, 2) | HYDRA | mpich(1, 2, 0, 1), ("Slurm", "slurm-lab-19.2", 1, 2)),
    (
        "srun --mpi=pmi2",
        slurm_step(0, 1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "19.0"},
        ("Slurm", "slurm-lab-19.0", 1, 2),
    ),
    ("srun --mpi=cray", slurm_step(0, 1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2"}, ("Slurm", "slurm-lab-19.0", 1, 2)),
    # typed in a shell that was a task of a step with pmi2
    (
        "srun --mpi=none",
        slurm_step(1, 1, 2) | {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "19.0"},
        ("Slurm", "slurm-lab-19.1", 1, 2),
    ),
]


@pytest.mark.parametrize(("name", "environ", "place"), INSIDE)
def test_inside_slurm(name: str, environ: dict[str, str], place: tuple[str, str, int, int]) -> None:
    task = find(environ)
    assert isinstance(task, SchedulerTask), name
    assert (task.source, task.job, task.placement.rank, task.placement.world_size) == place


def test_the_shell_of_salloc_with_pmi2() -> None:
    """For Slurm it is a task, with PMI variables if these are the default; for phalanx, it is an allocation."""
    shell = slurm_step(0xFFFFFFFA, 0, 1) | {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "19.4294967290"}
    found = find(shell | {"SLURM_NTASKS": "4"})
    assert isinstance(found, Allocation)
    assert (found.hosts, found.tasks, found.here) == (("node1", "node2"), (2, 2), "node1")
