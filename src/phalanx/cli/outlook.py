"""Which nodes a run would have, as far as that is known before they have met: for `phalanx plan`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cli.options import RunOptions
from phalanx.cli.surroundings import Surroundings
from phalanx.cluster.cluster import Cluster, Node, Slot
from phalanx.cluster.placement import Placement, place
from phalanx.cluster.sources.nodelist import counts
from phalanx.cluster.sources.task import SchedulerTask


@dataclass(frozen=True)
class Expected:
    """One node of the run."""

    host: str  # empty: nobody has said
    workers: int | None  # None: known when it has joined


@dataclass(frozen=True)
class Outlook:
    source: str  # who says which nodes there are
    nodes: tuple[Expected, ...]

    @property
    def placement(self) -> Placement | None:
        """Every rank's place, where all is known. Ranks that a scheduler deals out come in its usual order."""
        sizes = [node.workers for node in self.nodes]
        if not all(sizes):
            return None
        slots = ((Slot(),) * (size or 0) for size in sizes)
        nodes = (
            Node(id_, expected.host, own) for id_, (expected, own) in enumerate(zip(self.nodes, slots, strict=True))
        )
        return place(Cluster(tuple(nodes)))


def outlook(options: RunOptions, around: Surroundings, here: int, host: str) -> Outlook | None:
    """`here`: how many workers this node takes. None: there is no other node."""
    if options.hosts is not None:
        return Outlook(
            "--hosts over ssh",
            tuple(Expected(each.name, each.workers) for each in options.hosts),
        )
    if around.allocation is not None:
        allocation = around.allocation
        sizes: Sequence[int | None] = [None] * len(allocation.hosts)
        if any(tasks > 1 for tasks in allocation.tasks):
            sizes = allocation.tasks
        return Outlook(f"{allocation.source}, by a srun of its own", _nodes(allocation.hosts, _asked(options, sizes)))
    gathering = around.gathering
    if gathering is None:
        return None
    if gathering.task is not None:
        return _of_task(options, gathering.task, here)
    sizes = _asked(options, [None] * gathering.expected)
    own = gathering.member if gathering.member is not None else 0 if gathering.leads else None
    hosts = ["" for _ in sizes]
    if gathering.host is not None:
        hosts[0] = gathering.host
    if own is not None and own < len(hosts):  # else it is a spare
        hosts[own] = hosts[own] or host
        sizes = [here if id_ == own else size for id_, size in enumerate(sizes)]
    return Outlook(gathering.source, _nodes(hosts, sizes))


def _of_task(options: RunOptions, task: SchedulerTask, here: int) -> Outlook:
    if task.one_a_node is False:
        text = task.said.get("SLURM_STEP_TASKS_PER_NODE") or task.said.get("SLURM_TASKS_PER_NODE")
        if text and task.hosts:
            return Outlook(f"{task.source}, a task for every rank", _nodes(task.hosts, counts(text)))
        rest = task.size - task.local_size
        others = (Expected("", rest),) if rest else ()
        return Outlook(f"{task.source}, a task for every rank", (Expected("", task.local_size), *others))
    hosts = task.hosts or tuple("" for _ in range(task.size))
    sizes = _asked(options, [None] * len(hosts))
    own = task.node if task.node is not None else task.rank
    return Outlook(
        f"{task.source}, a task for every node",
        _nodes(hosts, [here if id_ == own else size for id_, size in enumerate(sizes)]),
    )


def _asked(options: RunOptions, otherwise: Sequence[int | None]) -> list[int | None]:
    if options.slots is not None and len(options.slots) in (1, len(otherwise)):
        return list(options.slots if len(options.slots) > 1 else options.slots * len(otherwise))
    if isinstance(options.workers, int):
        return [options.workers] * len(otherwise)
    return list(otherwise)


def _nodes(hosts: Sequence[str], sizes: Sequence[int | None]) -> tuple[Expected, ...]:
    return tuple(Expected(host, size) for host, size in zip(hosts, sizes, strict=True))
