"""Relevant variables of Slurm, recorded under Slurm 22.05."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

import pytest

from phalanx.cluster.sources import slurm
from phalanx.cluster.sources.launchers import find
from phalanx.cluster.sources.task import Allocation, SchedulerTask
from phalanx.errors import UsageError


def variables(text: str) -> dict[str, str]:
    """Parse `PROCID=0 …`. Every name gets the prefix SLURM_, except SLURMD_NODENAME."""
    pairs = (word.split("=", 1) for word in text.split())
    return {name if name.startswith(("SLURM", "PMI")) else f"SLURM_{name}": value for name, value in pairs}


JOB = variables("CLUSTER_NAME=lab JOB_ID=6 JOBID=6 JOB_NODELIST=node[1-2] NODELIST=node[1-2] JOB_NUM_NODES=2")


def step(text: str, *, size: int, tasks: str, nodes: int = 2, nodelist: str = "node[1-2]") -> dict[str, str]:
    """Return the variables that srun sets for all tasks of a step, and those of one task."""
    return {
        **JOB,
        **variables(
            f"STEP_ID=0 STEPID=0 NTASKS={size} NPROCS={size} STEP_NUM_TASKS={size} "
            f"NNODES={nodes} STEP_NUM_NODES={nodes} TASKS_PER_NODE={tasks} STEP_TASKS_PER_NODE={tasks} "
            f"STEP_NODELIST={nodelist} {text}"
        ),
    }


# srun -N2 -n2, one task on each node
PAIR = [
    step("PROCID=0 LOCALID=0 NODEID=0 SLURMD_NODENAME=node1", size=2, tasks="1(x2)"),
    step("PROCID=1 LOCALID=0 NODEID=1 SLURMD_NODENAME=node2", size=2, tasks="1(x2)"),
]
# sbatch -N2 --ntasks-per-node=2, the script itself
BATCH = JOB | variables(
    "NTASKS=4 NPROCS=4 NTASKS_PER_NODE=2 TASKS_PER_NODE=2(x2) NNODES=2 "
    "PROCID=0 LOCALID=0 NODEID=0 NODE_ALIASES=(null) SLURMD_NODENAME=node1"
)
# sbatch -N2 alone
BATCH_PLAIN = JOB | variables("TASKS_PER_NODE=1(x2) NNODES=2 PROCID=0 LOCALID=0 NODEID=0 SLURMD_NODENAME=node1")
# salloc -N2, its shell on the login node
SALLOC = JOB | variables("TASKS_PER_NODE=1(x2) NNODES=2 NODE_ALIASES=(null)")
# salloc -N2 --ntasks-per-node=2 where LaunchParameters=use_interactive_step: its shell on the first node
INTERACTIVE = JOB | variables(
    "STEP_ID=4294967290 STEPID=4294967290 NTASKS=4 NPROCS=4 NTASKS_PER_NODE=2 TASKS_PER_NODE=2(x2) NNODES=2 "
    "STEP_NODELIST=node1 STEP_NUM_NODES=1 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1 "
    "PROCID=0 LOCALID=0 NODEID=0 SLURMD_NODENAME=node1"
)

# name, environment, (rank, size, local rank, local size, node, nodes), one rank per node
STEPS = [
    ("srun -N2 -n2", PAIR[0], (0, 2, 0, 1, 0, 2), True),
    ("srun -N2 -n2", PAIR[1], (1, 2, 0, 1, 1, 2), True),
    ("srun -N2 -n3", step("PROCID=0 LOCALID=0 NODEID=0", size=3, tasks="2,1"), (0, 3, 0, 2, 0, 2), False),
    ("srun -N2 -n3", step("PROCID=1 LOCALID=1 NODEID=0", size=3, tasks="2,1"), (1, 3, 1, 2, 0, 2), False),
    ("srun -N2 -n3", step("PROCID=2 LOCALID=0 NODEID=1", size=3, tasks="2,1"), (2, 3, 0, 1, 1, 2), False),
    ("-m cyclic -n4", step("PROCID=1 LOCALID=0 NODEID=1", size=4, tasks="3,1"), (1, 4, 0, 1, 1, 2), False),
    ("-m cyclic -n4", step("PROCID=3 LOCALID=2 NODEID=0", size=4, tasks="3,1"), (3, 4, 2, 3, 0, 2), False),
    ("arbitrary", step("PROCID=0 LOCALID=0 NODEID=1", size=3, tasks="2,1"), (0, 3, 0, 1, 1, 2), False),
    ("arbitrary", step("PROCID=2 LOCALID=1 NODEID=0", size=3, tasks="2,1"), (2, 3, 1, 2, 0, 2), False),
]


@pytest.mark.parametrize(("name", "environ", "place", "alone"), STEPS)
def test_steps(name: str, environ: dict[str, str], place: tuple[int, ...], alone: bool) -> None:
    task = slurm.task(environ)
    assert task is not None, name
    assert astuple(task.placement) == place
    assert (task.source, task.job, task.hosts) == ("Slurm", "slurm-lab-6.0", ("node1", "node2"))
    assert task.one_a_node is alone
    assert task.variables.items() <= environ.items()
    assert task.variables["SLURM_PROCID"] == str(task.placement.rank)
    assert find(environ) == task
    assert slurm.allocation(environ) is None


def test_the_step_is_believed_before_the_batch_script() -> None:
    """`mpiexec.hydra -ppn 1` of Intel MPI keeps the variables of the batch script besides those of the step."""
    task = slurm.task(PAIR[1] | variables("NTASKS=4 NPROCS=4 TASKS_PER_NODE=2(x2) SLURMD_NODENAME=node1"))
    assert task is not None
    assert (task.placement.world_size, task.local_tasks, task.placement.node_rank) == (2, 1, 1)


def test_a_step_on_the_second_node_alone() -> None:
    """srun -N1 -n1 -r1 in a batch script with two nodes."""
    environ = step("PROCID=0 LOCALID=0 NODEID=0 STEP_ID=3", size=1, tasks="1", nodes=1, nodelist="node2")
    task = slurm.task(environ)
    assert task is not None
    assert (task.hosts, task.placement.node_count, task.one_a_node, task.job) == (("node2",), 1, True, "slurm-lab-6.3")


ALLOCATIONS = [
    ("sbatch -N2 --ntasks-per-node=2", BATCH, (2, 2), "node1"),
    ("sbatch -N2", BATCH_PLAIN, (), "node1"),  # 1(x2) is a default that nobody requested
    ("salloc -N2", SALLOC, (), None),
    ("salloc -N2, interactive step", INTERACTIVE, (2, 2), "node1"),
    ("another node's name", BATCH | {"SLURMD_NODENAME": "login"}, (2, 2), None),
]


@pytest.mark.parametrize(("name", "environ", "tasks", "here"), ALLOCATIONS)
def test_allocations(name: str, environ: dict[str, str], tasks: tuple[int, ...], here: str | None) -> None:
    found = slurm.allocation(environ)
    read = found.variables if found else {}
    assert found == Allocation("Slurm", "slurm-lab-6", ("node1", "node2"), tasks, here, read), name
    assert slurm.task(environ) is None
    assert find(environ) == found


@pytest.mark.parametrize("environ", [{}, {"SLURM_CONF": "/etc/slurm.conf"}, {"SLURM_JOB_ID": "6"}, {"PATH": "/bin"}])
def test_no_slurm(environ: dict[str, str]) -> None:
    assert find(environ) is None


JOBS = [
    ({}, "slurm-lab-6.0"),
    ({"SLURM_STEP_ID": "7"}, "slurm-lab-6.7"),
    ({"SLURM_RESTART_COUNT": "1"}, "slurm-lab-6.0-r1"),  # scontrol requeue: the same job, and its step 0 again
    ({"SLURM_CLUSTER_NAME": ""}, "slurm-6.0"),
    ({"SLURM_CLUSTER_NAME": "../a b"}, "slurm-..-a-b-6.0"),
]


@pytest.mark.parametrize(("change", "job"), JOBS)
def test_jobs_are_distinguished(change: dict[str, str], job: str) -> None:
    names = {found.job for environ in PAIR if (found := slurm.task(environ | change))}
    assert names == {job}


def test_a_requeued_allocation_is_another_one() -> None:
    found = slurm.allocation(BATCH | {"SLURM_RESTART_COUNT": "2"})
    assert found is not None
    assert found.job == "slurm-lab-6-r2"


HETEROGENEOUS = [
    step("HET_SIZE=2 PACK_SIZE=2 PROCID=1 LOCALID=0 NODEID=1", size=3, tasks="1,2"),  # srun A : B
    step(
        "HET_SIZE=2 PROCID=0 LOCALID=0 NODEID=0", size=1, tasks="1", nodes=1, nodelist="node1"
    ),  # srun in a heterogeneous batch job
    BATCH | {"SLURM_HET_SIZE": "2"},
    BATCH | {"SLURM_PACK_SIZE": "2"},  # before Slurm 20.02
]


@pytest.mark.parametrize("environ", HETEROGENEOUS)
def test_heterogeneous_jobs_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="heterogeneous") as refusal:
        find(environ)
    assert "-n NODES -i NODE_ID --master HOST:PORT" in refusal.value.fix
    assert refusal.value.exit_code == 2


# what is changed (None: removed), and what the message must contain
BROKEN = [
    ({"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
    ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a number"),
    ({"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1' is not a number"),
    ({"SLURM_PROCID": "2"}, "SLURM_PROCID=2 cannot be"),
    ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID='batch' is not a number"),
    ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS=0 cannot be"),
    ({"SLURM_STEP_NUM_TASKS": "3"}, "do not add up to 3 tasks on 2 nodes"),
    (
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": None, "SLURM_NPROCS": None},
        "none of SLURM_STEP_NUM_TASKS, SLURM_NTASKS",
    ),
    ({"SLURM_NODEID": None}, "SLURM_NODEID is not set"),
    ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 cannot be"),
    ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
    ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1 cannot be"),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE cannot be read: “2(x” is not a count"),
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "do not add up"),
    ({"SLURM_STEP_TASKS_PER_NODE": "2,0"}, "do not add up"),
    ({"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST cannot be read: the brackets"),
    ({"SLURM_STEP_NODELIST": "node[1-3]"}, "names 3 nodes, not 2"),
    ({"SLURM_JOB_ID": None, "SLURM_JOBID": None}, "none of SLURM_JOB_ID, SLURM_JOBID is set"),
    ({"SLURM_RESTART_COUNT": "?"}, "SLURM_RESTART_COUNT='?' is not a number"),
]


def changed(environ: Mapping[str, str], change: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**environ, **change}.items() if value is not None}


@pytest.mark.parametrize(("change", "what"), BROKEN)
def test_broken_steps_are_named(change: dict[str, str | None], what: str) -> None:
    with pytest.raises(UsageError) as refusal:
        find(changed(PAIR[0], change))
    assert what in refusal.value.what
    assert "srun phalanx run" in refusal.value.fix


BROKEN_ALLOCATIONS = [
    ({"SLURM_JOB_NODELIST": "node[3-1]"}, "SLURM_JOB_NODELIST cannot be read: the range 3-1 runs backwards"),
    ({"SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE cannot be read"),
    ({"SLURM_TASKS_PER_NODE": "2(x3)"}, "SLURM_TASKS_PER_NODE counts 3 nodes and the node list 2"),
    ({"SLURM_JOB_ID": "six"}, "SLURM_JOB_ID='six' is not a number"),
]


@pytest.mark.parametrize(("change", "what"), BROKEN_ALLOCATIONS)
def test_broken_allocations_are_named(change: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError) as refusal:
        find(BATCH | change)
    assert what in refusal.value.what


def test_the_message() -> None:
    with pytest.raises(UsageError) as refusal:
        find({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "5", "SLURM_JOB_ID": "6"})
    assert str(refusal.value).splitlines() == [
        "Slurm says where this process runs, but SLURM_PROCID=5 cannot be.",
        "  expected from 0 to 1",
        "  seen: SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=5",
        "  fix: srun phalanx run … in a fresh job, or without Slurm's help, "
        "on every node: phalanx run -n NODES -i NODE_ID --master HOST:PORT …",
    ]


def test_pty() -> None:
    """srun --pty bash, with phalanx typed there: a single task."""
    task = find(step("PROCID=0 LOCALID=0 NODEID=0", size=1, tasks="1", nodes=1, nodelist="node1"))
    assert isinstance(task, SchedulerTask)
    assert (task.placement.world_size, task.one_a_node) == (1, True)
