"""Finds which nodes a run would have, as far as known before they join, for `phalanx plan`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cli.launch_context import LaunchContext
from phalanx.cli.options import RunOptions
from phalanx.cluster.cluster import Cluster, Node, Slot
from phalanx.cluster.placement import Seat, place
from phalanx.cluster.sources.nodelist import counts
from phalanx.cluster.sources.task import SchedulerTask


@dataclass(frozen=True)
class ExpectedNode:
    """One node of the run."""

    host: str  # empty: unknown
    workers: int | None  # None: unknown until it joins


@dataclass(frozen=True)
class ExpectedNodes:
    """The nodes of a run, and the source that names them."""

    source: str
    nodes: tuple[ExpectedNode, ...]

    @property
    def seats(self) -> tuple[Seat, ...] | None:
        """Return the seats of all ranks, if all counts are known. Assumes the scheduler's usual order of ranks."""
        sizes = [node.workers for node in self.nodes]
        if not all(sizes):
            return None
        slots = ((Slot(),) * (size or 0) for size in sizes)
        nodes = (
            Node(id_, expected.host, own) for id_, (expected, own) in enumerate(zip(self.nodes, slots, strict=True))
        )
        return place(Cluster(tuple(nodes)))


def expected_nodes(options: RunOptions, context: LaunchContext, here: int, host: str) -> ExpectedNodes | None:
    """Return the nodes of the run; None: only this node. `here` is the number of workers on this node."""
    if options.nodes.hosts is not None:
        return ExpectedNodes(
            "--hosts over ssh",
            tuple(ExpectedNode(each.name, each.workers) for each in options.nodes.hosts),
        )
    if context.allocation is not None:
        allocation = context.allocation
        sizes: Sequence[int | None] = [None] * len(allocation.hosts)
        if any(tasks > 1 for tasks in allocation.tasks):
            sizes = allocation.tasks
        return ExpectedNodes(
            f"{allocation.source}, by its own srun", _nodes(allocation.hosts, _requested(options, sizes))
        )
    rendezvous = context.rendezvous
    if rendezvous is None:
        return None
    if rendezvous.task is not None:
        return _of_task(options, rendezvous.task, here)
    sizes = _requested(options, [None] * rendezvous.expected)
    own = rendezvous.member if rendezvous.member is not None else 0 if rendezvous.leads else None
    hosts = ["" for _ in sizes]
    if rendezvous.location.host is not None:
        hosts[0] = rendezvous.location.host
    if own is not None and own < len(hosts):  # otherwise it is a spare
        hosts[own] = hosts[own] or host
        sizes = [here if id_ == own else size for id_, size in enumerate(sizes)]
    return ExpectedNodes(rendezvous.source, _nodes(hosts, sizes))


def _of_task(options: RunOptions, task: SchedulerTask, here: int) -> ExpectedNodes:
    if task.one_a_node is False:
        source = f"{task.source}, one task per rank"
        text = task.variables.get("SLURM_STEP_TASKS_PER_NODE") or task.variables.get("SLURM_TASKS_PER_NODE")
        if text and task.hosts:
            return ExpectedNodes(source, _nodes(task.hosts, counts(text)))
        rest = task.placement.world_size - task.local_tasks
        others = (ExpectedNode("", rest),) if rest else ()
        return ExpectedNodes(source, (ExpectedNode("", task.local_tasks), *others))
    hosts = task.hosts or tuple("" for _ in range(task.placement.world_size))
    sizes = _requested(options, [None] * len(hosts))
    own = task.placement.node_rank if task.placement.node_rank is not None else task.placement.rank
    return ExpectedNodes(
        f"{task.source}, one task per node",
        _nodes(hosts, [here if id_ == own else size for id_, size in enumerate(sizes)]),
    )


def _requested(options: RunOptions, otherwise: Sequence[int | None]) -> list[int | None]:
    slots, count = options.workers.slots, options.workers.count
    if slots is not None and len(slots) in (1, len(otherwise)):
        return list(slots if len(slots) > 1 else slots * len(otherwise))
    if isinstance(count, int):
        return [count] * len(otherwise)
    return list(otherwise)


def _nodes(hosts: Sequence[str], sizes: Sequence[int | None]) -> tuple[ExpectedNode, ...]:
    return tuple(ExpectedNode(host, size) for host, size in zip(hosts, sizes, strict=True))
