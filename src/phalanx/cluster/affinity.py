"""Which cores each worker is bound to: torchrun's --numa-binding, as pure functions of a CpuTopology."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.cluster.cluster import Slot
from phalanx.errors import DeviceError

MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True)
class CpuTopology:
    """The NUMA nodes, sockets and caches of the cores of this host, and the NUMA nodes of its PCI devices.

    A group of cores (threads of a physical core, cores that share a cache) is identified by its lowest number.
    Defaults, if the kernel does not report it: one socket, one cache, one thread per core.
    """

    nodes: Mapping[int, frozenset[int]]  # NUMA node -> its cores
    allowed: frozenset[int]  # the cores that this process may use
    near: Mapping[str, int] = field(default_factory=dict)  # PCI address -> NUMA node
    socket: Mapping[int, int] = field(default_factory=dict)
    physical: Mapping[int, int] = field(default_factory=dict)  # core -> its physical core
    cache: Mapping[int, int] = field(default_factory=dict)  # core -> the group that shares its last-level cache

    def cores(self, node: int) -> frozenset[int]:
        """Return the usable cores of a NUMA node."""
        return self.nodes.get(node, frozenset()) & self.allowed

    def socket_of(self, node: int) -> int:
        """Return the socket of a NUMA node."""
        return self.socket.get(min(self.cores(node)), 0)

    def physical_cores(self, node: int) -> list[list[int]]:
        """Return the threads of each usable physical core of a NUMA node, in the order of their lowest numbers."""
        groups = _group(self.cores(node), lambda core: self.physical.get(core, core))
        return [groups[core] for core in sorted(groups)]

    def complexes(self, node: int) -> list[list[int]]:
        """Return the groups of usable cores that share a last-level cache, the largest first."""
        groups = _group(self.cores(node), lambda core: self.cache.get(core, -1))
        return [groups[key] for key in sorted(groups, key=lambda key: (-len(groups[key]), key))]


def bind(slots: Sequence[Slot], mode: str, topology: CpuTopology) -> tuple[Slot, ...]:
    """Return the slots with the cores of each worker.

    - `node`: all cores of the NUMA node of the worker's GPU
    - `socket`: all cores of the socket of this node
    - `exclusive`: an equal share of the physical cores of the node, not shared with other workers
    - `core-complex`: the cores of one last-level cache of the node, not shared if possible

    A worker without a GPU is assigned to the node with the most physical cores per worker. torchrun divides the cores
    of a node by all GPUs of the node, this function by the workers: the result differs only if GPUs are unused.
    """
    if mode not in MODES:
        raise DeviceError(
            f"--numa-binding {mode} is not known.",
            details=[f"known are: {', '.join(MODES)}"],
            fix="phalanx run --numa-binding node …",
        )
    homes = _homes(slots, topology)
    neighbours: dict[int, int] = defaultdict(int)  # workers seen so far on each node
    bound = []
    for slot, home in zip(slots, homes, strict=True):
        cores = _cores(mode, topology, home, neighbours[home], homes.count(home))
        neighbours[home] += 1
        bound.append(replace(slot, cores=tuple(sorted(cores))))
    return tuple(bound)


def _cores(mode: str, topology: CpuTopology, home: int, turn: int, workers: int) -> Iterable[int]:
    """Return the cores of worker number `turn` of the `workers` on NUMA node `home`."""
    if mode == "node":
        return topology.cores(home)
    if mode == "socket":
        socket = topology.socket_of(home)
        mates = [node for node in topology.nodes if topology.cores(node) and topology.socket_of(node) == socket]
        return [core for node in mates for core in topology.cores(node)]
    if mode == "exclusive":
        cores = topology.physical_cores(home)
        if len(cores) < workers:
            raise DeviceError(
                f"NUMA node {home} has {len(cores)} physical cores for us, too few for {workers} workers.",
                details=[f"cores of node {home} for this process: {spell(topology.cores(home))}"],
                fix="phalanx run --numa-binding node …",
            )
        share, rest = divmod(len(cores), workers)  # the first `rest` workers get one more
        start = turn * share + min(turn, rest)
        return [core for group in cores[start : start + share + (turn < rest)] for core in group]
    complexes = topology.complexes(home)
    return complexes[turn % len(complexes)]


def _homes(slots: Sequence[Slot], topology: CpuTopology) -> list[int]:
    """Return the NUMA node of each worker."""
    usable = {node: len(topology.physical_cores(node)) for node in topology.nodes if topology.cores(node)}
    if not usable:
        raise DeviceError(
            "no NUMA node has a core that this process may use.",
            details=[f"node {node}: cores {spell(cores)}" for node, cores in sorted(topology.nodes.items())]
            + [f"cores that this process may use: {spell(topology.allowed)}"],
            fix="phalanx run … without --numa-binding",
        )
    homes = [_home(slot, topology, sorted(usable)) for slot in slots]
    load = {node: homes.count(node) for node in sorted(usable)}
    for position, home in enumerate(homes):
        if home is None:
            roomy = max(load, key=lambda node: usable[node] / (load[node] + 1))  # the first of equals
            load[roomy] += 1
            homes[position] = roomy
    return [home for home in homes if home is not None]


def _home(slot: Slot, topology: CpuTopology, usable: Sequence[int]) -> int | None:
    if slot.device is None:
        return None
    if len(topology.nodes) == 1:
        return usable[0]
    home = topology.near.get(slot.device.bus)
    if home is None:
        raise DeviceError(
            f"which NUMA node {slot.device.name} {slot.device.uuid} is next to is not known.",
            details=[
                f"its PCI address is {slot.device.bus or 'not known'}",
                f"NUMA nodes: {spell(topology.nodes)}",
            ],
            fix="phalanx run … without --numa-binding",
        )
    if home not in usable:
        raise DeviceError(
            f"{slot.device.name} {slot.device.uuid} is next to NUMA node {home}, whose cores this process may not use.",
            details=[
                f"cores of node {home}: {spell(topology.nodes.get(home, ()))}",
                f"cores that this process may use: {spell(topology.allowed)}",
            ],
            fix="phalanx run … without --numa-binding   (or get those cores from the scheduler, or taskset)",
        )
    return home


def read(root: str = "/sys", allowed: Iterable[int] | None = None) -> CpuTopology:
    """Read the topology of this host from /sys."""
    mine = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {
        int(path.name.removeprefix("node")): frozenset(parse(_text(path / "cpulist")))
        for path in Path(root, "devices/system/node").glob("node[0-9]*")
    }
    cpus = {int(path.name.removeprefix("cpu")): path for path in Path(root, "devices/system/cpu").glob("cpu[0-9]*")}
    return CpuTopology(
        nodes=nodes or {0: frozenset(cpus) or mine},  # a kernel built without NUMA
        allowed=mine,
        near=_near(Path(root, "bus/pci/devices")),
        socket=_table(cpus, lambda path: int(_text(path / "topology/physical_package_id"))),
        physical=_table(cpus, lambda path: min(parse(_text(path / "topology/thread_siblings_list")))),
        cache=_table(cpus, _last_level),
    )


def _near(devices: Path) -> dict[str, int]:
    found = {}
    for path in devices.glob("*"):
        text = _text(path / "numa_node")
        if text:
            found[path.name] = max(int(text), 0)  # -1: not reported by the firmware, usually because there is one node
    return found


def _last_level(cpu: Path) -> int:
    levels = {
        int(_text(cache / "level")): min(parse(_text(cache / "shared_cpu_list")))
        for cache in cpu.glob("cache/index[0-9]*")
        if _text(cache / "type") in ("Unified", "Data")
    }
    return levels[max(levels)]


def _table(cpus: Mapping[int, Path], ask: Callable[[Path], int]) -> dict[int, int]:
    """Return the value of `ask` per core, without cores that the kernel does not describe."""
    table = {}
    for cpu, path in cpus.items():
        try:
            table[cpu] = ask(path)
        except ValueError:
            continue
    return table


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _group(cores: Iterable[int], key: Callable[[int], int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for core in cores:
        groups[key(core)].append(core)
    return groups


def parse(text: str) -> list[int]:
    """Parse a list of the kernel: `0-2,7` is 0, 1, 2, 7."""
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def spell(numbers: Iterable[int]) -> str:
    """Return numbers as a list of the kernel: the inverse of `parse`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs) or "none"
