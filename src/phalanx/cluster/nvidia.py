"""Lists the GPUs of this host, from the NVIDIA driver and the PCI bus.

It uses NVML, not CUDA: a process that has initialized CUDA cannot fork workers that use it. NVML has side effects too:
newer drivers (R580) load libcuda and start a thread that stays, with a few open files. So the agent calls it, never the
fork server, and the fork server is not forked from a process that has called it.
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
DISPLAY = "0x03"  # PCI class of display controllers, which includes GPUs without display outputs


def survey(environ: Mapping[str, str], root: str = "/") -> Inventory:
    """Return the GPUs of this host, as a process with this environment sees them."""
    bus, silent = scan(Path(root, "sys"))
    driver: tuple[Device, ...] = ()
    trouble = ""
    if bus or driver_present(Path(root)):
        driver, trouble = ask(by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID", expected=bool(bus))
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    return Inventory(
        driver,
        apply_mask(driver, mask),
        mask,
        bus,
        silent,
        trouble,
        confined=_confined(environ, Path(root)),
        other_vendor=not driver and Path(root, "dev/kfd").exists(),
    )


def _confined(environ: Mapping[str, str], root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv")
    jobs = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID")
    chosen = environ.get("NVIDIA_VISIBLE_DEVICES", "all") != "all"
    return chosen or any(name in environ for name in jobs) or any(mark.exists() for mark in marks)


def driver_present(root: Path) -> bool:
    """Return whether an NVIDIA kernel driver is loaded. Cheaper than importing NVML."""
    traces = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")  # dxg: WSL
    return any((root / trace).exists() for trace in traces)


def scan(sys: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the PCI addresses of NVIDIA GPUs, and of those that no longer respond."""
    bus: list[str] = []
    silent: list[str] = []
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        if _read(device / "vendor") != NVIDIA or not _read(device / "class").startswith(DISPLAY):
            continue
        # Skip virtual functions, and GPUs that were passed to a virtual machine.
        if (device / "physfn").exists() or _bound_to(device) not in ("", "nvidia"):
            continue
        bus.append(device.name)
        if not _answers(device):
            silent.append(device.name)
    return tuple(bus), tuple(silent)


def ask(*, by_bus: bool, expected: bool) -> tuple[tuple[Device, ...], str]:
    """Return the devices that the driver lists, and why it could not be queried, if it failed.

    by_bus    CUDA numbers GPUs in the order of the bus, as NVML does
    expected  there are GPUs on the bus, so a driver that is not loaded is a problem
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
            continue  # belongs to another job: the scheduler denies access
        except nvml.NVMLError as error:
            troubles.append(f"GPU {index} does not answer the driver: {error}")
    whole = [device for device in found if device.kind == "gpu"]
    numbered = len(whole) == count and all(device.handle for device in whole)
    if numbered and (by_bus or len({device.name for device in whole}) == 1):
        # Users and scripts expect numbers in CUDA_VISIBLE_DEVICES. UUIDs are used only if numbers are ambiguous.
        found = [replace(device, handle=str(device.index)) for device in found]
    return tuple(found), "; ".join(troubles)


def _gpu(nvml: Any, index: int) -> Iterator[Device]:
    """Yield a GPU, then its MIG slices."""
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
            continue  # not created, or no permission
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
        return False  # GPUs without MIG raise an error
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _memory(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0  # not reported by GPUs that share the memory of the CPU


def _address(text: str | bytes) -> str:
    """Convert a PCI address of NVML (00000000:3B:00.0) to that of the kernel (0000:3b:00.0)."""
    domain, rest = (text.decode() if isinstance(text, bytes) else text).lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _bound_to(device: Path) -> str:
    try:
        return os.path.basename(os.readlink(device / "driver"))
    except OSError:
        return ""


def _answers(device: Path) -> bool:
    """Return whether a device responds. The configuration of one that fell off the bus reads as all ones."""
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
