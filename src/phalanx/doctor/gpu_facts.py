"""The GPUs of this machine, as the driver, the PCI bus and the kernel log describe them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cluster import nvidia
from phalanx.cluster import xids as kernel_xids
from phalanx.cluster.xids import XidLine
from phalanx.doctor import torch_build
from phalanx.doctor.quantity import several

_SLOWED = {
    "HwSlowdown": "the hardware halves its clock",
    "HwThermalSlowdown": "it is too hot",
    "HwPowerBrakeSlowdown": "the power supply asks for less",
    "SwThermalSlowdown": "it is too hot",
}


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory: int = 0
    user: str = ""  # empty: the process is in another container, or has exited
    command: str = ""


@dataclass(frozen=True)
class GpuPower:
    """Power, temperature, and the reasons of throttling of a GPU. None: unknown."""

    limit: int | None = None  # watts
    default: int | None = None
    slowed: tuple[str, ...] = ()
    temperature: int | None = None


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU. None: unknown."""

    total: int = 0
    used: int = 0
    ecc: bool | None = None
    errors_now: int | None = None  # uncorrected errors since the driver was loaded
    errors_ever: int | None = None
    pending: bool = False  # pages or rows will be replaced at the next reset
    remap_failed: bool = False


@dataclass(frozen=True)
class GpuFacts:
    """What the driver reports about a GPU. None: unknown."""

    index: int
    name: str
    bus: str = ""
    persistence: bool | None = None
    power: GpuPower = GpuPower()
    memory: GpuMemory = GpuMemory()
    sliced: bool = False
    processes: tuple[GpuProcess, ...] = ()
    links: int = 0  # number of active NVLinks
    links_down: int = 0


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine."""

    gpus: tuple[GpuFacts, ...] = ()
    bus: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()  # on the bus, but not in the driver's list
    silent: tuple[str, ...] = ()  # on the bus, but not answering
    confined: bool = False  # a container or a scheduler may hide some GPUs
    hidden: int = 0  # number hidden by CUDA_VISIBLE_DEVICES
    trouble: str = ""
    driver: str = ""
    driver_cuda: str = ""
    torch_cuda: str = ""
    xids: tuple[XidLine, ...] = ()
    topology: str = ""


def read(environ: Mapping[str, str], root: str = "/") -> Gpus:
    """Read the state of all GPUs."""
    inventory = nvidia.survey(environ, root)
    if not inventory.bus and not inventory.driver and not inventory.trouble:
        return Gpus()
    found: tuple[GpuFacts, ...] = ()
    driver = cuda = topology = ""
    if inventory.driver:
        found, driver, cuda, topology = _ask()
    return Gpus(
        gpus=found,
        bus=inventory.bus,
        gone=inventory.gone,
        silent=inventory.silent,
        confined=inventory.confined,
        hidden=len(inventory.hidden),
        trouble=inventory.trouble,
        driver=driver,
        driver_cuda=cuda,
        torch_cuda=torch_build.read().get("cuda", ""),
        xids=kernel_xids.read(),
        topology=topology,
    )


def _ask() -> tuple[tuple[GpuFacts, ...], str, str, str]:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return (), "", "", ""  # the inventory reports it
    try:
        known = _known(nvml)
        handles: list[Any] = []
        found: list[GpuFacts] = []
        for index in range(known(nvml.nvmlDeviceGetCount) or 0):
            handle = known(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                handles.append(handle)
                found.append(_gpu(nvml, known, handle, index))
        cuda = known(nvml.nvmlSystemGetCudaDriverVersion_v2)
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        return tuple(found), _word(known(nvml.nvmlSystemGetDriverVersion)), version, _topology(nvml, known, handles)
    finally:
        nvml.nvmlShutdown()


def _known(nvml: Any) -> Callable[..., Any]:
    """Query NVML. None: not supported by this driver or GPU."""

    def known(ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except (nvml.NVMLError, AttributeError, ValueError):
            return None

    return known


def _gpu(nvml: Any, known: Callable[..., Any], handle: Any, index: int) -> GpuFacts:
    persistence = known(nvml.nvmlDeviceGetPersistenceMode, handle)
    mig = known(nvml.nvmlDeviceGetMigMode, handle)
    pci = known(nvml.nvmlDeviceGetPciInfo, handle)
    up, down = _links(nvml, known, handle)
    return GpuFacts(
        index=index,
        name=_word(known(nvml.nvmlDeviceGetName, handle)) or "GPU",
        bus=_word(pci.busId).lower() if pci else "",
        persistence=None if persistence is None else bool(persistence),
        power=_power(nvml, known, handle),
        memory=_memory(nvml, known, handle),
        sliced=bool(mig and mig[0]),
        processes=tuple(_processes(known(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ())),
        links=up,
        links_down=down,
    )


def _power(nvml: Any, known: Callable[..., Any], handle: Any) -> GpuPower:
    return GpuPower(
        limit=_watts(known(nvml.nvmlDeviceGetPowerManagementLimit, handle)),
        default=_watts(known(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        slowed=tuple(_slowed(nvml, known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0)),
        temperature=known(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
    )


def _memory(nvml: Any, known: Callable[..., Any], handle: Any) -> GpuMemory:
    memory = known(nvml.nvmlDeviceGetMemoryInfo, handle)
    remapped = known(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    retired = known(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    ecc = known(nvml.nvmlDeviceGetEccMode, handle)
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return GpuMemory(
        total=int(memory.total) if memory else 0,
        used=int(memory.used) if memory else 0,
        ecc=None if ecc is None else bool(ecc[0]),
        errors_now=known(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_VOLATILE_ECC),
        errors_ever=known(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_AGGREGATE_ECC),
        pending=bool(remapped[2]) or bool(retired),
        remap_failed=bool(remapped[3]),
    )


def _links(nvml: Any, known: Callable[..., Any], handle: Any) -> tuple[int, int]:
    states = [known(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    return sum(state == 1 for state in states), sum(state == 0 for state in states)


def _slowed(nvml: Any, reasons: int) -> Iterator[str]:
    for name, what in _SLOWED.items():
        if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0):
            yield what


def _processes(running: Sequence[Any]) -> Iterator[GpuProcess]:
    import psutil

    for one in running:
        if one.pid == os.getpid():
            continue
        user = command = ""
        try:
            process = psutil.Process(one.pid)
            user, command = process.username(), " ".join(process.cmdline())[:60]
        except (psutil.Error, OSError):
            pass  # the process is in another container: its pid is meaningless here
        yield GpuProcess(one.pid, int(one.usedGpuMemory or 0), user, command)


def _topology(nvml: Any, known: Callable[..., Any], handles: Sequence[Any]) -> str:
    """Return how the GPUs are connected, in a few words."""
    ways: dict[str, int] = {}
    words = {
        nvml.NVML_TOPOLOGY_INTERNAL: "on one board",
        nvml.NVML_TOPOLOGY_SINGLE: "under one PCIe switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "across PCIe switches",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "across a PCIe host bridge",
        nvml.NVML_TOPOLOGY_NODE: "across host bridges of one NUMA node",
        nvml.NVML_TOPOLOGY_SYSTEM: "across sockets",
    }
    for first, one in enumerate(handles):
        for other in handles[first + 1 :]:
            linked = known(nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if linked == nvml.NVML_P2P_STATUS_OK:
                way = "by NVLink"
            else:
                way = words.get(known(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other), "in a way not known")
            ways[way] = ways.get(way, 0) + 1
    if len(ways) == 1:
        return f"all pairs {next(iter(ways))}"
    return ", ".join(f"{several(count, 'pair')} {way}" for way, count in ways.items())


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def _word(text: str | bytes | None) -> str:
    return text.decode() if isinstance(text, bytes) else text or ""
