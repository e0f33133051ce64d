"""Reads the variables of Slurm: the task of this process in a job step, or the nodes of an allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from phalanx.cluster.sources.nodelist import counts, expand
from phalanx.cluster.sources.task import BY_HAND, Allocation, SchedulerTask, Variables, file_name
from phalanx.contract.ranks.placement import PartialPlacement

T = TypeVar("T")

# Steps that no user has started: the batch script, the shell of salloc (use_interactive_step), ssh into a job.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def task(environ: Mapping[str, str]) -> SchedulerTask | None:
    """Return the task of this process. None: srun did not start it."""
    if not in_step(environ):
        return None
    variables = _variables(environ)
    _refuse_heterogeneous(variables)
    # The step's name comes first: `srun --preserve-env` and MPI launchers keep the other variables of the batch script.
    size = variables.size("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    rank = variables.index("SLURM_PROCID", below=size)
    nodes = variables.size("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node = variables.index("SLURM_NODEID", below=nodes)
    tasks = _parsed(variables, counts, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if len(tasks) != nodes or sum(tasks) != size or 0 in tasks:
        raise variables.refuse(f"its numbers do not add up to {size} tasks on {nodes} nodes")
    local_rank = variables.index("SLURM_LOCALID", below=tasks[node])
    hosts = _parsed(variables, expand, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if len(hosts) != nodes:
        raise variables.refuse(f"its node list names {len(hosts)} nodes, not {nodes}")
    return SchedulerTask(
        source="Slurm",
        job=_job(variables, step=True),
        placement=PartialPlacement(
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=tasks[node],
            node_rank=node,
            node_count=nodes,
        ),
        hosts=hosts,
        variables=variables.found,
    )


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the nodes of a batch script or of the shell of salloc. None: there are none, or this is a task on them."""
    variables = _variables(environ)
    job, nodelist = (
        variables.text("SLURM_JOB_ID", "SLURM_JOBID"),
        variables.text("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    )
    if job is None or nodelist is None or in_step(environ):
        return None
    _refuse_heterogeneous(variables)
    hosts = _parsed(variables, expand, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    tasks: tuple[int, ...] = ()
    # If the user gives no number of tasks, Slurm sets it to the number of CPUs.
    if (
        variables.text("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE") is not None
        and variables.text("SLURM_TASKS_PER_NODE") is not None
    ):
        tasks = _parsed(variables, counts, "SLURM_TASKS_PER_NODE")
        if len(tasks) != len(hosts):
            raise variables.refuse(f"SLURM_TASKS_PER_NODE counts {len(tasks)} nodes and the node list {len(hosts)}")
    here = variables.text("SLURMD_NODENAME")
    return Allocation(
        source="Slurm",
        job=_job(variables, step=False),
        hosts=hosts,
        tasks=tasks,
        here=here if here in hosts else None,
        variables=variables.found,
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process for the user. A batch script has a SLURM_PROCID too."""
    variables = _variables(environ)
    if variables.text("SLURM_STEP_ID", "SLURM_STEPID") is None:
        return False
    return variables.number("SLURM_STEP_ID", "SLURM_STEPID") < FIRST_SPECIAL_STEP


def _variables(environ: Mapping[str, str]) -> Variables:
    return Variables("Slurm", environ, fix=f"srun phalanx run … in a fresh job, or without Slurm's help, {BY_HAND}")


def _job(variables: Variables, *, step: bool) -> str:
    name = str(variables.number("SLURM_JOB_ID", "SLURM_JOBID", least=1))
    if step:
        name += f".{variables.number('SLURM_STEP_ID', 'SLURM_STEPID')}"
    # A requeued job keeps its number, and step numbers start again.
    restarts = "" if variables.text("SLURM_RESTART_COUNT") is None else f"r{variables.number('SLURM_RESTART_COUNT')}"
    return file_name("slurm", variables.text("SLURM_CLUSTER_NAME") or "", name, restarts)


def _parsed(variables: Variables, parse: Callable[[str], T], *names: str) -> T:
    value = variables.needed(*names)
    try:
        return parse(value)
    except ValueError as why:
        name = next(name for name in names if name in variables.found)
        raise variables.refuse(f"{name} cannot be read: {why}") from None


def _refuse_heterogeneous(variables: Variables) -> None:
    """Raise for a heterogeneous job: its variables describe one component or all, depending on srun's options."""
    size = variables.text("SLURM_HET_SIZE", "SLURM_PACK_SIZE")
    if size is not None and size not in ("0", "1"):
        raise variables.refuse(
            f"this job is heterogeneous, with {size} components that cannot be distinguished here",
            fix=f"{BY_HAND}   (or a job of one component)",
        )
