"""GPUs: all present, healthy, not in use by others, not throttled. Unknown values are no finding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cluster import nvidia
from phalanx.cluster import xids as kernel_xids
from phalanx.cluster.affinity import spell
from phalanx.cluster.xids import XidLine
from phalanx.doctor.checks import xids
from phalanx.doctor.checks.versions import torch_build
from phalanx.doctor.finding import Finding
from phalanx.doctor.quantity import listed, several, size

CHECK = "gpus"
_UNEXPLAINED = 2 << 30  # memory in use that no process is seen to hold; a driver keeps up to 1 GiB for itself

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
    user: str = ""  # empty: of another container, or gone
    command: str = ""


@dataclass(frozen=True)
class GpuFacts:
    """What the driver says about a GPU. None: unknown."""

    index: int
    name: str
    bus: str = ""
    persistence: bool | None = None
    power_limit: int | None = None  # watts
    power_default: int | None = None
    slowed: tuple[str, ...] = ()
    temperature: int | None = None
    ecc: bool | None = None
    errors_now: int | None = None  # uncorrected memory errors since the driver was loaded
    errors_ever: int | None = None
    pending: bool = False  # pages or rows wait for a reset to be replaced
    remap_failed: bool = False
    memory: int = 0
    memory_used: int = 0
    sliced: bool = False
    processes: tuple[GpuProcess, ...] = ()
    links: int = 0  # NVLinks that are up
    links_down: int = 0


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine."""

    gpus: tuple[GpuFacts, ...] = ()
    bus: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()  # on the bus, but not in the driver's list
    silent: tuple[str, ...] = ()  # on the bus, but not answering
    confined: bool = False  # a container or a scheduler may keep some from us
    hidden: int = 0  # by CUDA_VISIBLE_DEVICES
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
        confined=_confined(environ, Path(root)),
        hidden=len(inventory.hidden),
        trouble=inventory.trouble,
        driver=driver,
        driver_cuda=cuda,
        torch_cuda=torch_build().get("cuda", ""),
        xids=kernel_xids.read(),
        topology=topology,
    )


def _confined(environ: Mapping[str, str], root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv")
    jobs = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID")
    chosen = environ.get("NVIDIA_VISIBLE_DEVICES", "all") != "all"
    return chosen or any(name in environ for name in jobs) or any(mark.exists() for mark in marks)


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
    """Ask NVML. None: this driver or GPU does not know."""

    def known(ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except (nvml.NVMLError, AttributeError, ValueError):
            return None

    return known


def _gpu(nvml: Any, known: Callable[..., Any], handle: Any, index: int) -> GpuFacts:
    memory = known(nvml.nvmlDeviceGetMemoryInfo, handle)
    remapped = known(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    retired = known(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    ecc = known(nvml.nvmlDeviceGetEccMode, handle)
    persistence = known(nvml.nvmlDeviceGetPersistenceMode, handle)
    mig = known(nvml.nvmlDeviceGetMigMode, handle)
    pci = known(nvml.nvmlDeviceGetPciInfo, handle)
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    up, down = _links(nvml, known, handle)
    return GpuFacts(
        index=index,
        name=_word(known(nvml.nvmlDeviceGetName, handle)) or "GPU",
        bus=_word(pci.busId).lower() if pci else "",
        persistence=None if persistence is None else bool(persistence),
        power_limit=_watts(known(nvml.nvmlDeviceGetPowerManagementLimit, handle)),
        power_default=_watts(known(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        slowed=tuple(_slowed(nvml, known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0)),
        temperature=known(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        ecc=None if ecc is None else bool(ecc[0]),
        errors_now=known(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_VOLATILE_ECC),
        errors_ever=known(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, nvml.NVML_AGGREGATE_ECC),
        pending=bool(remapped[2]) or bool(retired),
        remap_failed=bool(remapped[3]),
        memory=int(memory.total) if memory else 0,
        memory_used=int(memory.used) if memory else 0,
        sliced=bool(mig and mig[0]),
        processes=tuple(_processes(known(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ())),
        links=up,
        links_down=down,
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
            pass  # of another container: its pid means nothing here
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


def judge(facts: Gpus) -> list[Finding]:
    """Return findings about the GPUs."""
    found = [*_judge_count(facts), *_judge_driver(facts), *_judge_memory(facts), *xids.judge(facts.xids)]
    found += [*_judge_use(facts), *_judge_power(facts), *_judge_links(facts)]
    if found:
        return found
    if not facts.gpus:
        return [Finding(CHECK, "green", "none")]
    return [Finding(CHECK, "green", describe(facts))]


def describe(facts: Gpus) -> str:
    """Return the GPUs in one line."""
    kinds: dict[str, int] = {}
    for gpu in facts.gpus:
        kinds[gpu.name] = kinds.get(gpu.name, 0) + 1
    words = [", ".join(f"{count} {name}" for name, count in kinds.items())]
    if facts.hidden:
        words.append(f"{facts.hidden} hidden by CUDA_VISIBLE_DEVICES")
    if facts.gone:
        words.append(f"{len(facts.gone)} more on the bus are not for us")
    if facts.driver:
        words.append(f"driver {facts.driver}" + (f" (CUDA {facts.driver_cuda})" if facts.driver_cuda else ""))
    if facts.topology:
        words.append(facts.topology)
    return "; ".join(words)


def _judge_count(facts: Gpus) -> Iterator[Finding]:
    reset = "nvidia-smi --gpu-reset as root; else a reboot"
    lost = [address for address in facts.silent if address in facts.gone or not facts.gpus]
    if lost:
        yield _red(
            f"no answer from {several(len(lost), 'GPU')} on the PCI bus: {listed(lost)}",
            "it fell off the bus: a fault of power, heat, slot or card",
            reset,
        )
    unlisted = [address for address in facts.gone if address not in facts.silent]
    if unlisted and not facts.confined:
        yield _yellow(
            f"the PCI bus has {len(facts.bus)} GPUs, the driver lists {len(facts.gpus)}: without {listed(unlisted)}",
            "a container or a scheduler keeps it from this process, or it is broken",
            "nvidia-smi -L; dmesg | grep NVRM",
        )
    if facts.trouble:
        yield _red(facts.trouble, "", "nvidia-smi; dmesg | grep NVRM")
    elif facts.bus and not facts.gpus and not facts.confined and not lost:
        yield _yellow(
            f"there are {several(len(facts.bus), 'GPU')} on the PCI bus, and no NVIDIA driver",
            "it is not installed, or this container was started without GPUs",
            "install the driver   (docker run --gpus all …)",
        )


def _judge_driver(facts: Gpus) -> Iterator[Finding]:
    if not facts.driver_cuda or not facts.torch_cuda:
        return
    if int(facts.driver_cuda.split(".")[0]) < int(facts.torch_cuda.split(".")[0]):
        yield _red(
            f"torch was built for CUDA {facts.torch_cuda}, the driver {facts.driver} knows {facts.driver_cuda} at most",
            "the driver is too old for this torch",
            f"a newer driver, or a build of torch for CUDA {facts.driver_cuda.split('.')[0]}",
        )


def _judge_memory(facts: Gpus) -> Iterator[Finding]:
    for gpu in facts.gpus:
        who = f"GPU {gpu.index}"
        if gpu.remap_failed:
            yield _red(
                f"{who} could not replace a broken row of its memory",
                "no spare rows are left",
                "have the card exchanged",
            )
        if gpu.pending:
            yield _yellow(
                f"{who} waits for a reset to replace broken memory",
                "it had memory errors that could not be corrected",
                f"nvidia-smi --gpu-reset -i {gpu.index}   (when nobody uses it)",
            )
        if gpu.errors_now:
            yield _red(
                f"{who} had {several(gpu.errors_now, 'memory error')} that could not be corrected since the "
                "driver was loaded",
                "results may be wrong, and processes that meet one are killed",
                f"nvidia-smi --gpu-reset -i {gpu.index}; if they come back, have the card exchanged",
            )
        elif gpu.errors_ever and not gpu.pending:
            yield _yellow(
                f"{who} had {several(gpu.errors_ever, 'memory error')} that could not be corrected in its life",
                "none since the driver was loaded",
                f"keep an eye on it: nvidia-smi -q -d ECC -i {gpu.index}",
            )


def _judge_use(facts: Gpus) -> Iterator[Finding]:
    for gpu in facts.gpus:
        if gpu.processes:
            who = [
                f"process {process.pid} ({process.user or 'not of this container'}"
                f"{', ' + process.command if process.command else ''}"
                f"{', ' + size(process.memory) if process.memory else ''})"
                for process in gpu.processes
            ]
            yield _yellow(
                f"GPU {gpu.index} is in use by {listed(who)}",
                "another run, or processes that an earlier run has left",
                "phalanx ps, nvidia-smi; or choose others: phalanx run --devices …",
            )
        elif gpu.memory_used > _UNEXPLAINED and not gpu.sliced:
            yield _yellow(
                f"{size(gpu.memory_used)} of GPU {gpu.index} are in use by processes that cannot be seen from here",
                "another container's, or of a process that did not end",
                "nvidia-smi on the machine itself",
            )


def _judge_power(facts: Gpus) -> Iterator[Finding]:
    capped = [
        gpu for gpu in facts.gpus if gpu.power_limit and gpu.power_default and gpu.power_limit < gpu.power_default
    ]
    if capped:
        first = capped[0]
        yield _yellow(
            f"{_which(capped)} may draw {first.power_limit} W, less than {first.power_default} W, which is usual",
            "a power limit is set; the slowest GPU determines the speed",
            f"nvidia-smi -pl {first.power_default}",
        )
    off = [gpu for gpu in facts.gpus if gpu.persistence is False]
    if off:
        yield _yellow(
            f"persistence mode is off for {_which(off)}",
            "the driver is initialized for every first process, which takes seconds",
            "nvidia-smi -pm 1   (or the service nvidia-persistenced)",
        )
    for gpu in facts.gpus:
        if gpu.slowed:
            heat = f", at {gpu.temperature} °C" if gpu.temperature is not None else ""
            yield _yellow(
                f"GPU {gpu.index} is slowed down{heat}",
                "; ".join(dict.fromkeys(gpu.slowed)),
                f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}",
            )


def _judge_links(facts: Gpus) -> Iterator[Finding]:
    most = max((gpu.links for gpu in facts.gpus), default=0)
    fewer = [gpu for gpu in facts.gpus if gpu.links < most and gpu.links_down]
    if fewer:
        yield _yellow(
            f"{_which(fewer)} has {fewer[0].links} NVLinks up, others have {most}",
            "a link that failed, or a bridge that is loose",
            "nvidia-smi nvlink -s",
        )


def _which(gpus: Sequence[GpuFacts]) -> str:
    return f"GPU{'' if len(gpus) == 1 else 's'} {spell(gpu.index for gpu in gpus)}"


def _yellow(fact: str, cause: str, fix: str) -> Finding:
    return Finding(CHECK, "yellow", fact, cause, fix)


def _red(fact: str, cause: str, fix: str) -> Finding:
    return Finding(CHECK, "red", fact, cause, fix)
