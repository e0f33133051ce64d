"""Finds out whether a run has one node or several, from the command line, ssh, Slurm or MPI.

If two sources disagree, the error names both.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.cli.options import RunOptions
from phalanx.cluster.sources.task import Allocation, SchedulerTask
from phalanx.contract.home import preferred
from phalanx.errors import OptionError, UsageError

if TYPE_CHECKING:  # a run on one node does not need it
    from phalanx.launcher.rendezvous_config import RendezvousConfig

_PORTS = range(20000, 30000)  # below the kernel's ephemeral ports


@dataclass(frozen=True)
class LaunchContext:
    """What is known about other nodes before a plan is made."""

    rendezvous: RendezvousConfig | None = None  # None: one node
    allocation: Allocation | None = None  # nodes on which no task has been started yet
    node: int = 0  # the index of this node, if known


def detect_context(options: RunOptions, environ: Mapping[str, str], home: str) -> LaunchContext:
    """Return which nodes take part, and how this node joins them."""
    several = options.nodes.max_nodes > 1
    if options.nodes.standalone or (options.nodes.count_given and not several):
        return LaunchContext()
    found = _scheduler(options, environ)
    if isinstance(found, SchedulerTask) and found.placement.world_size > 1:
        _agree(options, found)
        return LaunchContext(_from_task(options, environ, home, found), node=found.placement.node_rank or 0)
    if several:
        rendezvous = _from_command_line(options, environ, home)
        return LaunchContext(rendezvous, node=rendezvous.member or 0)
    if isinstance(found, Allocation) and (len(found.hosts) > 1 or found.here is None):
        return LaunchContext(allocation=found)
    return LaunchContext()


def _scheduler(options: RunOptions, environ: Mapping[str, str]) -> SchedulerTask | Allocation | None:
    if not any(name.startswith(("SLURM", "OMPI_", "PMI", "MPI_")) for name in environ):
        return None  # does not import anything
    from phalanx.cluster.sources import launchers

    try:
        return launchers.find(environ)
    except UsageError:
        if options.nodes.max_nodes > 1 and options.nodes.node_rank is not None:
            return None  # the command line already has what the error would request
        raise


# -- command line


def _from_command_line(options: RunOptions, environ: Mapping[str, str], home: str) -> RendezvousConfig:
    from phalanx.launcher.rendezvous_config import LeaderLocation

    nodes, address, slots = options.nodes, options.rendezvous.master_addr, options.workers.slots
    elastic = nodes.min_nodes < nodes.max_nodes
    count = f"{nodes.min_nodes}:{nodes.max_nodes}" if elastic else nodes.max_nodes
    if address is None and nodes.node_rank != 0:
        raise OptionError(
            f"{count} nodes, but the address of node 0 is missing",
            details=["expected the name or address of node 0, the same on every node"],
            fix=f"phalanx run -n {count} -i {nodes.node_rank or 0} --master HOST …",
        )
    if nodes.node_rank is None and slots is not None and len(set(slots)) > 1:
        given = f"-g {','.join(map(str, slots))}"
        raise OptionError(
            f"{given} differs per node, and the index of this node is missing",
            fix=f"phalanx run -n {count} {given} -i 0 --master HOST …",
        )
    # In an elastic run, a node 0 that rejoins does not lead. The node that has the address leads.
    open_ = nodes.node_rank is None or ((nodes.spares or elastic) and address is not None)
    return replace(
        _common(options, environ, home, nodes.max_nodes),
        source="the command line",
        member=nodes.node_rank,
        leads=None if open_ else nodes.node_rank == 0,
        location=LeaderLocation(address, options.rendezvous.master_port or 0),
        echo=True,
        least=nodes.min_nodes,
        spares=nodes.spares,
    )


# -- scheduler


def _from_task(options: RunOptions, environ: Mapping[str, str], home: str, task: SchedulerTask) -> RendezvousConfig:
    from phalanx.control.leader_file import LeaderFile
    from phalanx.launcher.rendezvous_config import LeaderLocation

    address = options.rendezvous.master_addr
    if not task.job and address is None:
        raise UsageError(
            f"{task.source} does not name its job, so its tasks cannot find each other",
            details=[_seen(task)],
            fix="mpiexec … phalanx run --master HOST …, with the host of rank 0",
        )
    placement = task.placement
    by_node = task.one_a_node is True and placement.node_rank is not None
    leads = placement.rank == 0
    if placement.node_rank is not None:  # rank 0 may not be on the first node
        leads = (placement.node_rank, placement.local_rank) == (0, 0)
    port = options.rendezvous.master_port if address is not None else None
    if port is None:
        port = _PORTS[zlib.crc32(task.job.encode()) % len(_PORTS)] if task.hosts else 0
    shared = home if placement.node_count == 1 else preferred(environ)
    file = LeaderFile(os.path.join(shared, "meetings"), task.job) if task.job else None
    return replace(
        _common(options, environ, home, placement.world_size),
        source=task.source,
        member=placement.node_rank if by_node else placement.rank,
        leads=leads,
        location=LeaderLocation(address or (task.hosts[0] if task.hosts else None), port, file=file),
        echo=False,
        task=task,
        names=task.hosts if by_node else (),
    )


def _agree(options: RunOptions, task: SchedulerTask) -> None:
    """Raise if the command line contradicts the scheduler."""
    if options.nodes.hosts is not None:
        raise OptionError(
            f"--hosts and {task.source} both say where the ranks run",
            details=[_seen(task)],
            fix=f"leave --hosts out: this is task {task.placement.rank} of {task.placement.world_size} already",
        )
    nodes = task.placement.node_count if task.one_a_node is not False else None
    count, rank, workers = options.nodes.max_nodes, options.nodes.node_rank, options.workers.count
    if options.nodes.count_given and nodes is not None and count != nodes:
        raise OptionError(
            f"--nnodes {count} and {task.source}, which has {nodes} nodes, contradict each other",
            details=[_seen(task)],
            fix=f"leave --nnodes out, or --nnodes {nodes}; --standalone runs on this node alone",
        )
    node_rank = task.placement.node_rank
    if rank is not None and node_rank is not None and rank != node_rank:
        raise OptionError(
            f"--node-rank {rank} and {task.source}, where this is node {node_rank}, contradict each other",
            details=[_seen(task)],
            fix="leave --node-rank out",
        )
    if task.one_a_node is False and workers not in (None, 1):
        raise OptionError(
            f"{workers} workers were requested, but {task.source} has started one task per rank "
            f"({task.local_tasks} on this node)",
            details=[_seen(task)],
            fix="leave -g out, or start one task per node: srun --ntasks-per-node 1 phalanx run -g N …",
        )


def _seen(task: SchedulerTask | Allocation) -> str:
    return f"{task.source} says: {' '.join(f'{name}={value}' for name, value in task.variables.items())}"


# -- common


def _common(options: RunOptions, environ: Mapping[str, str], home: str, expected: int) -> RendezvousConfig:
    """Return the settings that do not depend on how the other nodes were found."""
    from phalanx.cluster.software import versions
    from phalanx.control import tokens
    from phalanx.launcher.rendezvous_config import JoinTerms, RendezvousConfig, RendezvousTimeouts

    meeting, slots = options.rendezvous, options.workers.slots
    promised = slots if slots is not None and len(slots) == expected else ()
    return RendezvousConfig(
        source="",
        expected=expected,
        member=None,
        leads=None,
        token=tokens.find(environ, file=meeting.token_file, home=home, open_=meeting.no_auth),
        timeouts=RendezvousTimeouts(meeting.join_timeout, meeting.node_timeout, meeting.last_call),
        terms=JoinTerms(
            meeting.run_id if meeting.run_id not in (None, "none") else "",
            versions(),
            join_settings(options, expected, promised),
        ),
        promised=promised,
        attach_from=meeting.attach_from,
    )


def join_settings(options: RunOptions, nodes: int, promised: tuple[int, ...]) -> dict[str, str]:
    """Return what must be equal on all nodes. Ranks of different programs would wait for each other forever."""
    import hashlib

    least = f"{options.nodes.min_nodes}:" if options.nodes.min_nodes < options.nodes.max_nodes else ""
    found = {"nodes": f"{least}{nodes}", "script": _script(options)}
    if promised:
        found["workers"] = ",".join(map(str, promised))[:200]
    found["arguments"] = hashlib.sha256("\0".join(options.script.args).encode(errors="surrogateescape")).hexdigest()[
        :16
    ]
    return found


def _script(options: RunOptions) -> str:
    script = options.script
    name = os.path.basename(script.target)[:120]
    if script.kind not in ("script", "path"):
        return name
    try:
        return f"{name} sha256 {script_digest(script.target)[:16]}"
    except OSError:
        return name  # `Command.check` reports it


def script_digest(path: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
