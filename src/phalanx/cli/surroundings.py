"""One node or several, and who said so: the command line, ssh, Slurm or MPI. Where two disagree, both are named."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.cli.options import RunOptions
from phalanx.cluster.sources.task import Allocation, SchedulerTask
from phalanx.contract.home import preferred
from phalanx.errors import OptionError, UsageError
from phalanx.launch.coordination.rendezvous_config import RendezvousConfig

_PORTS = range(20000, 30000)  # below those that the kernel gives away


@dataclass(frozen=True)
class Surroundings:
    """What is known before a plan is made."""

    gathering: RendezvousConfig | None = None  # None: one node, and nobody to meet
    allocation: Allocation | None = None  # nodes that wait for somebody to start tasks on them
    node: int = 0  # which of the nodes this is, where it is known


def look_around(options: RunOptions, environ: Mapping[str, str], home: str) -> Surroundings:
    by_hand = options.max_nodes > 1
    if options.standalone or (options.nodes_told and not by_hand):
        return Surroundings()
    found = _scheduler(options, environ)
    if isinstance(found, SchedulerTask) and found.size > 1:
        _agree(options, found)
        return Surroundings(_of_task(options, environ, home, found), node=found.node or 0)
    if by_hand:
        gathering = _by_hand(options, environ, home)
        return Surroundings(gathering, node=gathering.member or 0)
    if isinstance(found, Allocation) and (len(found.hosts) > 1 or found.here is None):
        return Surroundings(allocation=found)
    return Surroundings()


def _scheduler(options: RunOptions, environ: Mapping[str, str]) -> SchedulerTask | Allocation | None:
    if not any(name.startswith(("SLURM", "OMPI_", "PMI", "MPI_")) for name in environ):
        return None  # and nothing is imported to find that out
    from phalanx.cluster.sources import launchers

    try:
        return launchers.find(environ)
    except UsageError:
        if options.max_nodes > 1 and options.node_id is not None:
            return None  # the user has said everything by hand, as that error would ask for
        raise


# -- by hand


def _by_hand(options: RunOptions, environ: Mapping[str, str], home: str) -> RendezvousConfig:
    nodes = f"{options.min_nodes}:{options.max_nodes}" if options.min_nodes < options.max_nodes else options.max_nodes
    if options.master_addr is None and options.node_id != 0:
        raise OptionError(
            f"{nodes} nodes, but nobody said where node 0 is",
            details=["expected the name or address of node 0, the same on every node"],
            fix=f"phalanx run -n {nodes} -i {options.node_id or 0} --master HOST …",
        )
    if options.node_id is None and options.slots is not None and len(set(options.slots)) > 1:
        raise OptionError(
            f"-g {','.join(map(str, options.slots))} is different for each node, and nobody said which one this is",
            fix=f"phalanx run -n {nodes} -g {','.join(map(str, options.slots))} -i 0 --master HOST …",
        )
    # Where nodes come and go, a node 0 that comes back does not lead: whoever has the address does.
    elastic = options.spares or options.min_nodes < options.max_nodes
    told = None if options.node_id is None or (elastic and options.master_addr is not None) else options.node_id == 0
    return replace(
        _shared(options, environ, home, options.max_nodes),
        source="the command line",
        member=options.node_id,
        leads=told,
        host=options.master_addr,
        port=options.master_port or 0,
        echo=True,
        least=options.min_nodes,
        spares=options.spares,
    )


# -- tasks of a scheduler


def _of_task(options: RunOptions, environ: Mapping[str, str], home: str, task: SchedulerTask) -> RendezvousConfig:
    from phalanx.control.leader_file import LeaderFile

    if not task.job and options.master_addr is None:
        raise UsageError(
            f"{task.source} does not name its job, so its tasks cannot find each other by themselves",
            details=[_said(task)],
            fix="mpiexec … phalanx run --master HOST …, with the host of rank 0",
        )
    by_node = task.one_a_node is True and task.node is not None
    port = options.master_port if options.master_addr is not None else None
    if port is None:
        port = _PORTS[zlib.crc32(task.job.encode()) % len(_PORTS)] if task.hosts else 0
    shared = home if task.nodes == 1 else preferred(environ)
    return replace(
        _shared(options, environ, home, task.size),
        source=task.source,
        member=task.node if by_node else task.rank,
        leads=(task.node, task.local_rank) == (0, 0) if task.node is not None else task.rank == 0,
        host=options.master_addr or (task.hosts[0] if task.hosts else None),
        port=port,
        echo=False,
        task=task,
        names=task.hosts if by_node else (),
        meeting=LeaderFile(os.path.join(shared, "meetings"), task.job) if task.job else None,
    )


def _agree(options: RunOptions, task: SchedulerTask) -> None:
    """What the user typed and what the scheduler says."""
    if options.hosts is not None:
        raise OptionError(
            f"--hosts and {task.source} both say where the ranks run",
            details=[_said(task)],
            fix=f"leave --hosts out: this is task {task.rank} of {task.size} already",
        )
    nodes = task.nodes if task.one_a_node is not False else None
    if options.nodes_told and nodes is not None and options.max_nodes != nodes:
        raise OptionError(
            f"--nnodes {options.max_nodes} and {task.source}, which has {nodes} nodes, contradict each other",
            details=[_said(task)],
            fix=f"leave --nnodes out, or --nnodes {nodes}; --standalone runs on this node alone",
        )
    if options.node_id is not None and task.node is not None and options.node_id != task.node:
        raise OptionError(
            f"--node-rank {options.node_id} and {task.source}, where this is node {task.node}, contradict each other",
            details=[_said(task)],
            fix="leave --node-rank out",
        )
    if task.one_a_node is False and options.workers not in (None, 1):
        raise OptionError(
            f"{options.workers} workers were asked for, but {task.source} has started one task for every rank "
            f"({task.local_size} on this node)",
            details=[_said(task)],
            fix="leave -g out, or start one task a node: srun --ntasks-per-node 1 phalanx run -g N …",
        )


def _said(task: SchedulerTask | Allocation) -> str:
    return f"{task.source} says: {' '.join(f'{name}={value}' for name, value in task.said.items())}"


# -- what all of them share


def _shared(options: RunOptions, environ: Mapping[str, str], home: str, expected: int) -> RendezvousConfig:
    """What does not depend on who said that there are several."""
    from phalanx.cluster.software import versions
    from phalanx.control import tokens

    promised = options.slots if options.slots is not None and len(options.slots) == expected else ()
    return RendezvousConfig(
        source="",
        expected=expected,
        member=None,
        leads=None,
        host=None,
        port=0,
        token=tokens.find(environ, file=options.token_file, home=home, open_=options.no_auth),
        run=options.run_id if options.run_id not in (None, "none") else "",
        promised=promised,
        join_timeout=options.join_timeout,
        last_call=options.last_call,
        node_timeout=options.node_timeout,
        versions=versions(),
        terms=terms(options, expected, promised),
    )


def terms(options: RunOptions, nodes: int, promised: tuple[int, ...]) -> dict[str, str]:
    """What has to be the same everywhere, or the ranks would wait for each other in different programs."""
    import hashlib

    least = f"{options.min_nodes}:" if options.min_nodes < options.max_nodes else ""
    found = {"nodes": f"{least}{nodes}", "script": _script(options)}
    if promised:
        found["workers"] = ",".join(map(str, promised))[:200]
    found["arguments"] = hashlib.sha256("\0".join(options.args).encode(errors="surrogateescape")).hexdigest()[:16]
    return found


def _script(options: RunOptions) -> str:
    name = os.path.basename(options.script)[:120]
    if options.kind not in ("script", "path"):
        return name
    try:
        return f"{name} sha256 {script_digest(options.script)[:16]}"
    except OSError:
        return name  # said by whoever checks the command


def script_digest(path: str) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
