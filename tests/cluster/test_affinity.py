"""bind: which cores each worker gets, on fake /sys trees.

The four modes are compared with torch's own NUMA binding, which reads the same trees. It asks CUDA for the PCI
addresses of the GPUs; that answer is faked, because these tests run without a GPU.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.affinity import MODES, CpuTopology, bind, parse, read, spell
from phalanx.cluster.cluster import Device, Slot
from phalanx.errors import DeviceError


@dataclass(frozen=True)
class Machine:
    """A machine, to be written as a /sys tree. Threads are numbered as usual: core 0 of 8 has threads 0 and 8."""

    nodes: tuple[int, ...]  # number of physical cores of each NUMA node
    per_socket: int = 1  # NUMA nodes per socket
    threads: int = 2
    complex: int = 4  # physical cores that share a last-level cache
    gpus: tuple[int, ...] = ()  # the NUMA node of each GPU, as the kernel reports it
    blocked: frozenset[int] = frozenset()  # cores that this process may not use

    @property
    def total(self) -> int:
        return sum(self.nodes)

    @property
    def allowed(self) -> frozenset[int]:
        return frozenset(range(self.total * self.threads)) - self.blocked

    def logical(self, cores: Iterable[int]) -> list[int]:
        return sorted(core + thread * self.total for core in cores for thread in range(self.threads))

    def write(self, root: Path) -> None:
        first = 0
        put(root / "devices/system/node/possible", f"0-{len(self.nodes) - 1}")
        for node, count in enumerate(self.nodes):
            cores = range(first, first + count)
            put(root / f"devices/system/node/node{node}/cpulist", spell(self.logical(cores)))
            for core in cores:
                start = first + (core - first) // self.complex * self.complex
                shared = self.logical(range(start, min(start + self.complex, first + count)))
                for cpu in self.logical([core]):
                    self.write_cpu(root / f"devices/system/cpu/cpu{cpu}", node, self.logical([core]), shared)
            first += count
        for number, node in enumerate(self.gpus):
            put(root / f"bus/pci/devices/{address(number)}/numa_node", str(node))

    def write_cpu(self, cpu: Path, node: int, siblings: list[int], shared: list[int]) -> None:
        put(cpu / "topology/physical_package_id", str(node // self.per_socket))
        put(cpu / "topology/thread_siblings_list", spell(siblings))
        for index, (kind, level, cores) in enumerate(
            [
                ("Data", 1, siblings),
                ("Instruction", 1, siblings),
                ("Unified", 3, shared),
                ("Unified", 2, siblings),
            ]
        ):
            put(cpu / f"cache/index{index}/type", kind)
            put(cpu / f"cache/index{index}/level", str(level))
            put(cpu / f"cache/index{index}/shared_cpu_list", spell(cores))


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def address(number: int) -> str:
    return f"0000:{number + 16:02x}:00.0"


def gpu(number: int) -> Slot:
    return Slot(Device("gpu", number, str(number), f"GPU-{number}", "NVIDIA H200", address(number)))


def bound(machine: Machine, mode: str, slots: list[Slot], root: Path) -> list[list[int]]:
    machine.write(root)
    return [list(slot.cores) for slot in bind(slots, mode, read(str(root), machine.allowed))]


TWO = Machine((8, 8), gpus=(0, 0, 1, 1))  # node 0: cores 0-7 and their second threads 16-23
FOUR = Machine((4, 4, 4, 4), per_socket=2, complex=2, gpus=(0, 3))

TABLE = [
    (TWO, "node", ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]),
    (TWO, "socket", ["0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31"]),
    (TWO, "exclusive", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    (TWO, "core-complex", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    (FOUR, "node", ["0-3,16-19", "12-15,28-31"]),
    (FOUR, "socket", ["0-7,16-23", "8-15,24-31"]),
    (FOUR, "exclusive", ["0-3,16-19", "12-15,28-31"]),
    (FOUR, "core-complex", ["0-1,16-17", "12-13,28-29"]),
    # Seven cores for three workers: the first gets one more.
    (Machine((7,), threads=1, gpus=(0, 0, 0)), "exclusive", ["0-2", "3-4", "5-6"]),
    # More GPUs than complexes: workers are assigned round-robin.
    (Machine((4,), threads=1, complex=2, gpus=(0, 0, 0)), "core-complex", ["0-1", "2-3", "0-1"]),
    # A complex with blocked cores comes after a complete one.
    (Machine((4,), threads=1, complex=2, gpus=(0, 0), blocked=frozenset({0})), "core-complex", ["2-3", "1"]),
    # The NUMA node of the GPU is unknown.
    (Machine((4,), threads=1, gpus=(-1,)), "node", ["0-3"]),
    (Machine((2, 2), threads=1, gpus=(-1, 1)), "node", ["0-1", "2-3"]),
]


@pytest.mark.parametrize(("machine", "mode", "cores"), TABLE)
def test_modes(tmp_path: Path, machine: Machine, mode: str, cores: list[str]) -> None:
    slots = [gpu(number) for number in range(len(machine.gpus))]
    assert [spell(found) for found in bound(machine, mode, slots, tmp_path)] == cores


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    per_socket = draw(st.integers(1, 2))
    count = per_socket * draw(st.integers(1, 2))
    nodes = tuple(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)))
    threads = draw(st.integers(1, 2))
    # At least the last core of each node stays usable: torch fails for a node without usable cores.
    kept = {sum(nodes[: n + 1]) - 1 for n in range(count)}
    blocked = draw(st.frozensets(st.integers(0, sum(nodes) * threads - 1))) - kept
    gpus = tuple(draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=5)))
    return Machine(nodes, per_socket, threads, draw(st.integers(1, 4)), gpus, blocked)


@pytest.fixture(scope="module")
def torch_binding() -> Any:
    import torch.numa.binding

    return torch.numa.binding


def by_torch(binding: Any, machine: Machine, mode: str, root: Path) -> list[list[int]]:
    """Return the cores to which torchrun would bind each local rank, with /sys at `root`."""

    def moved(path: str) -> str:
        return str(root) + path.removeprefix("/sys")

    def properties(number: int) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=number + 16, pci_device_id=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "open", lambda path: io.StringIO(Path(moved(path)).read_text()), raising=False)
        patch.setattr(binding, "os", SimpleNamespace(listdir=lambda path: os.listdir(moved(path)), path=os.path))
        patch.setattr(binding.torch.cuda, "get_device_properties", properties)
        patch.setattr(binding, "_get_gpu_count", lambda: len(machine.gpus))
        patch.setattr(binding, "_get_allowed_cpu_indices_for_current_thread", lambda: set(machine.allowed))
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        return [
            sorted(binding._get_logical_cpus_to_bind_to(gpu_index=number, numa_options=options))
            for number in range(len(machine.gpus))
        ]


@pytest.mark.extended
@settings(max_examples=60, deadline=None)
@given(machine=machines(), mode=st.sampled_from(MODES))
def test_every_worker_gets_what_torchrun_would_give_it(torch_binding: Any, machine: Machine, mode: str) -> None:
    slots = [gpu(number) for number in range(len(machine.gpus))]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        machine.write(root)
        try:
            theirs = by_torch(torch_binding, machine, mode, root)
        except RuntimeError:  # fewer cores than workers
            with pytest.raises(DeviceError):
                bound(machine, mode, slots, root)
        else:
            assert bound(machine, mode, slots, root) == theirs


def test_torch_offers_no_mode_that_we_lack(torch_binding: Any) -> None:
    assert sorted(mode.value for mode in torch_binding.AffinityMode) == sorted(MODES)


def test_slices_of_one_gpu_share_its_node(tmp_path: Path) -> None:
    slices = [Slot(Device("mig", 0, name, name, "H200 MIG", address(0))) for name in ("MIG-1", "MIG-2")]
    assert bound(TWO, "exclusive", slices, tmp_path) == [parse("0-3,16-19"), parse("4-7,20-23")]


def test_unused_gpus_leave_their_cores_to_the_workers(tmp_path: Path) -> None:
    assert bound(TWO, "exclusive", [gpu(1)], tmp_path) == [parse("0-7,16-23")]


CPU_TABLE = [
    (Machine((2, 2), threads=1), "node", 3, ["0-1", "2-3", "0-1"]),
    (Machine((2, 2), threads=1), "exclusive", 4, ["0", "2", "1", "3"]),
    (Machine((2, 2), threads=2), "exclusive", 2, ["0-1,4-5", "2-3,6-7"]),
    (Machine((2, 2, 2, 2), per_socket=2, threads=1), "socket", 3, ["0-3", "0-3", "4-7"]),
    (Machine((4, 4), threads=1, complex=2), "core-complex", 4, ["0-1", "4-5", "2-3", "6-7"]),
    # A node with three times the cores gets three times the workers.
    (Machine((2, 6), threads=1), "exclusive", 4, ["2-3", "4-5", "0-1", "6-7"]),
    # Nodes without usable cores are skipped.
    (Machine((2, 2), threads=1, blocked=frozenset({0, 1})), "node", 2, ["2-3", "2-3"]),
    (Machine((2, 2), per_socket=2, threads=1, blocked=frozenset({2, 3})), "socket", 1, ["0-1"]),
]


@pytest.mark.parametrize(("machine", "mode", "workers", "cores"), CPU_TABLE)
def test_workers_without_a_gpu_are_spread(
    tmp_path: Path, machine: Machine, mode: str, workers: int, cores: list[str]
) -> None:
    assert [spell(found) for found in bound(machine, mode, [Slot()] * workers, tmp_path)] == cores


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 12))
def test_exclusive_cpu_workers_fit_whenever_there_is_a_core_each(nodes: list[int], workers: int) -> None:
    starts = [sum(nodes[:n]) for n in range(len(nodes) + 1)]
    topology = CpuTopology(
        nodes={n: frozenset(range(starts[n], starts[n + 1])) for n in range(len(nodes))},
        allowed=frozenset(range(starts[-1])),
    )
    if workers > starts[-1]:
        with pytest.raises(DeviceError):
            bind([Slot()] * workers, "exclusive", topology)
        return
    slots = bind([Slot()] * workers, "exclusive", topology)
    used = [core for slot in slots for core in slot.cores]
    assert all(slot.cores for slot in slots)
    assert len(used) == len(set(used))


def test_too_few_cores_for_a_share_each() -> None:
    topology = CpuTopology(nodes={0: frozenset({0, 1, 2})}, allowed=frozenset({0, 2}))
    with pytest.raises(DeviceError) as caught:
        bind([Slot()] * 3, "exclusive", topology)
    assert str(caught.value) == (
        "NUMA node 0 has 2 physical cores for us, too few for 3 workers.\n"
        "  cores of node 0 for this process: 0,2\n"
        "  fix: phalanx run --numa-binding node …"
    )


def test_a_gpu_beside_cores_that_are_not_ours(tmp_path: Path) -> None:
    machine = Machine((2, 2), threads=1, gpus=(0,), blocked=frozenset({0, 1}))
    with pytest.raises(DeviceError, match="next to NUMA node 0, whose cores this process may not use") as caught:
        bound(machine, "node", [gpu(0)], tmp_path)
    assert caught.value.details == ("cores of node 0: 0-1", "cores that this process may use: 2-3")


def test_a_gpu_of_unknown_place(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="which NUMA node NVIDIA H200 GPU-9 is next to is not known"):
        bound(TWO, "node", [gpu(9)], tmp_path)
    assert bound(Machine((2,), threads=1), "node", [gpu(9)], tmp_path / "one") == [[0, 1]]


def test_an_unknown_mode() -> None:
    with pytest.raises(DeviceError, match="--numa-binding core is not known"):
        bind([Slot()], "core", CpuTopology(nodes={0: frozenset({0})}, allowed=frozenset({0})))


def test_a_kernel_without_numa_information_is_one_node(tmp_path: Path) -> None:
    topology = read(str(tmp_path), allowed=[0, 1, 2])
    assert [spell(slot.cores) for slot in bind([Slot()] * 2, "exclusive", topology)] == ["0-1", "2"]
    for mode in ("node", "socket", "core-complex"):
        assert [spell(slot.cores) for slot in bind([Slot()] * 2, mode, topology)] == ["0-2", "0-2"]


@pytest.mark.parametrize("mode", MODES)
def test_this_machine_can_be_bound(mode: str) -> None:
    (slot,) = bind([Slot()], mode, read())
    assert slot.cores
    assert set(slot.cores) <= os.sched_getaffinity(0)


@given(st.frozensets(st.integers(0, 200), min_size=1))
def test_lists_are_spelled_as_they_are_read(numbers: frozenset[int]) -> None:
    assert parse(spell(numbers)) == sorted(numbers)
