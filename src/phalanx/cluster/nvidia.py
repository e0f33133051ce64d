"""Asks the NVIDIA driver and the PCI bus what GPUs there are.

Through NVML, never CUDA: a process that has initialised CUDA cannot fork workers that use it. But NVML is not
without traces either: newer drivers (R580) load libcuda from it and start a thread that stays, with a few open
files. So the agent asks, never the fork server, and the fork server is not forked from a process that has asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.cluster.cluster import Device
from phalanx.cluster.inventory import Inventory, Slice, apply_mask

NVIDIA = "0x10de"
DISPLAY = "0x03"  # the PCI class of display controllers; a GPU without an outlet is one too


def survey(environ: Mapping[str, str], root: str = "/") -> Inventory:
    """What there is on this machine, as a process with this environment would see it."""
    bus, silent = scan(Path(root, "sys"))
    driver: tuple[Device, ...] = ()
    trouble = ""
    if bus or driver_present(Path(root)):
        driver, trouble = ask(by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID", expected=bool(bus))
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    return Inventory(driver, apply_mask(driver, mask), mask, bus, silent, trouble)


def driver_present(root: Path) -> bool:
    """Whether an NVIDIA kernel driver is loaded: cheaper to see than by importing NVML in vain."""
    traces = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")  # the last one is Windows' own, under WSL
    return any((root / trace).exists() for trace in traces)


def scan(sys: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """NVIDIA GPUs on the PCI bus, and those of them that no longer answer."""
    bus: list[str] = []
    silent: list[str] = []
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        if _read(device / "vendor") != NVIDIA or not _read(device / "class").startswith(DISPLAY):
            continue
        # A virtual function is no GPU of its own, and one that was given to a guest is not ours to miss.
        if (device / "physfn").exists() or _bound_to(device) not in ("", "nvidia"):
            continue
        bus.append(device.name)
        if not _answers(device):
            silent.append(device.name)
    return tuple(bus), tuple(silent)


def ask(*, by_bus: bool, expected: bool) -> tuple[tuple[Device, ...], str]:
    """The driver's devices, and what kept it from answering; `expected`: there are GPUs that it should list.

    `by_bus` says that CUDA numbers GPUs in the order of the bus, as NVML does.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return (), "the package nvidia-ml-py is not installed, so the NVIDIA driver could not be asked"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return (), ""  # a machine without the driver, or a container that was started without GPUs
    except nvml.NVMLError_DriverNotLoaded as error:
        return (), f"the NVIDIA driver does not run: {error}" if expected else ""
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer: {error}"
    try:
        return _list(nvml, by_bus)
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver does not list its GPUs: {error}"
    finally:
        nvml.nvmlShutdown()


def _list(nvml: Any, by_bus: bool) -> tuple[tuple[Device, ...], str]:
    found: list[Device] = []
    troubles: list[str] = []
    count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        try:
            found.extend(_gpu(nvml, index))
        except nvml.NVMLError_NoPermission:
            continue  # another job's: the scheduler keeps it from us
        except nvml.NVMLError as error:
            troubles.append(f"GPU {index} does not answer the driver: {error}")
    whole = [device for device in found if device.kind == "gpu"]
    numbered = len(whole) == count and all(device.handle for device in whole)
    if numbered and (by_bus or len({device.name for device in whole}) == 1):
        # People and scripts expect numbers in CUDA_VISIBLE_DEVICES: UUIDs only where those could mislead.
        found = [replace(device, handle=str(device.index)) for device in found]
    return tuple(found), "; ".join(troubles)


def _gpu(nvml: Any, index: int) -> Iterator[Device]:
    """One GPU, followed by its MIG slices."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = nvml.nvmlDeviceGetUUID(handle)
    sliced = _mig_enabled(nvml, handle)
    gpu = Device(
        kind="gpu",
        index=index,
        handle="" if sliced else uuid,
        uuid=uuid,
        name=nvml.nvmlDeviceGetName(handle),
        bus=_address(nvml.nvmlDeviceGetPciInfo(handle).busId),
        memory=_memory(nvml, handle),
    )
    yield gpu
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if sliced else 0):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue  # there is room for it, but it was not made, or is not ours
        name = nvml.nvmlDeviceGetUUID(part)
        place = f"{nvml.nvmlDeviceGetGpuInstanceId(part)}/{nvml.nvmlDeviceGetComputeInstanceId(part)}"
        yield Slice(
            kind="mig",
            index=index,
            handle=name,
            uuid=name,
            name=nvml.nvmlDeviceGetName(part),
            bus=gpu.bus,
            memory=_memory(nvml, part),
            alias=f"MIG-{uuid}/{place}",
        )


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False  # most GPUs cannot be sliced, and say so with an error
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _memory(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0  # GPUs that share the memory of the CPU do not say


def _address(text: str | bytes) -> str:
    """The kernel's spelling (0000:3b:00.0) of NVML's PCI address (00000000:3B:00.0)."""
    domain, rest = (text.decode() if isinstance(text, bytes) else text).lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _bound_to(device: Path) -> str:
    try:
        return os.path.basename(os.readlink(device / "driver"))
    except OSError:
        return ""


def _answers(device: Path) -> bool:
    """A device that fell off the bus reads as all ones, its vendor's number included."""
    try:
        with open(device / "config", "rb") as config:
            return config.read(2) != b"\xff\xff"
    except OSError:
        return True  # not known to be dead


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
