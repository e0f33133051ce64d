"""How busy the GPUs of this node are, and how healthy, by the driver's word, where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from phalanx.cluster import xids
from phalanx.cluster.cluster import Device
from phalanx.diagnose.evidence import Gpu, Xid

_HEALTH = 0.6  # seconds for all that is asked about errors: use and memory are not to be lost by it
_RECENT = 3600.0  # seconds: older Xids are of earlier runs

_asking = threading.Lock()  # held while the driver is asked: by one that hangs, for good


async def asked(devices: Sequence[Device | None], limit: float, *, health: bool = False) -> list[Gpu | None]:
    """Nothing, where the driver does not answer in time. The thread is a daemon: one that hangs keeps nobody from the
    end. `health`: errors too, which are some hundred questions for each GPU: only for a run that stands still."""
    nothing: list[Gpu | None] = [None] * len(devices)
    if not any(devices) or not _asking.acquire(blocking=False):
        return nothing
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Gpu | None]] = loop.create_future()

    def give(found: list[Gpu | None]) -> None:
        if not answer.done():
            answer.set_result(found)

    def ask() -> None:
        found = nothing
        with contextlib.suppress(Exception):
            found = look(devices, health=True) if health else look(devices)
        _asking.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(give, found)

    threading.Thread(target=ask, name="driver", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, limit)
    except TimeoutError:
        return nothing


def look(devices: Sequence[Device | None], *, health: bool = False) -> list[Gpu | None]:
    """Of each of these; None: it is no GPU, or nobody says. NVML is imported here alone: it leaves a thread behind."""
    nothing: list[Gpu | None] = [None] * len(devices)
    if not any(devices):
        return nothing
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not answer
        return nothing
    try:
        found = [None if device is None else _one(nvml, device) for device in devices]
        return examined(nvml, devices, found, xids.read()) if health else found
    finally:
        nvml.nvmlShutdown()


def _one(nvml: Any, device: Device) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        return Gpu(index=device.index, use=0.0, lost=True)
    except nvml.NVMLError:  # a slice has no figures of its own
        return None
    return Gpu(index=device.index, use=use, memory=int(used), throttled=_throttled(nvml, handle))


def _throttled(nvml: Any, handle: Any) -> str:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return ""
    heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    power = nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown  # a cap of its own is reached by every GPU that works
    return "thermal" if reasons & heat else "power" if reasons & power else ""


# -- errors


def examined(
    nvml: Any, devices: Sequence[Device | None], found: Sequence[Gpu | None], reported: Sequence[xids.XidLine]
) -> list[Gpu | None]:
    """With what the driver and the kernel log tell about errors, until the time for it is over."""
    ends = time.monotonic() + _HEALTH
    ranks = Counter(device.index for device in devices if device is not None)
    known: dict[int, dict[str, Any]] = {}  # one GPU may be that of several ranks
    result: list[Gpu | None] = []
    for device, gpu in zip(devices, found, strict=True):
        if device is None or (gpu is not None and gpu.lost):
            result.append(gpu)
            continue
        if device.index not in known:
            known[device.index] = _errors(nvml, device, reported) if time.monotonic() < ends else {}
        bare = gpu if gpu is not None else Gpu(index=device.index, use=-1.0)
        shared = device.kind == "mig" or ranks[device.index] > 1
        result.append(replace(bare, shared=shared, **known[device.index]))
    return result


def _errors(nvml: Any, device: Device, reported: Sequence[xids.XidLine]) -> dict[str, Any]:
    """Of a slice: those of its GPU. What this driver or this GPU does not know counts as no error."""

    def known(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except (nvml.NVMLError, AttributeError, ValueError, TypeError):
            return None

    handle = known("nvmlDeviceGetHandleByIndex", device.index)
    if handle is None:
        return {}
    remapped = known("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    uncorrected = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), getattr(nvml, "NVML_VOLATILE_ECC", 0)
    down, errors = _nvlinks(nvml, known, handle)
    pci = known("nvmlDeviceGetPciInfo", handle)
    bus = device.bus or _text(getattr(pci, "busId", ""))
    found = {
        "ecc": int(known("nvmlDeviceGetTotalEccErrors", handle, *uncorrected) or 0),
        "remap_pending": bool(remapped[2]) or bool(known("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
        "remap_failed": bool(remapped[3]),
        "nvlink_down": down,
        "nvlink_errors": errors,
        "pcie_replays": int(known("nvmlDeviceGetPcieReplayCounter", handle) or 0),
        "xids": tuple(
            Xid(xid.number, round(xid.age, 1), _said(xid.text))
            for xid in reported
            if xid.age <= _RECENT and bus and _same_bus(xid.bus, bus)
        ),
    }
    throttled = _throttled(nvml, handle)
    return {**found, "throttled": throttled} if throttled else found


def _nvlinks(nvml: Any, known: Callable[..., Any], handle: Any) -> tuple[int, int]:
    """Links that are down where others are up, and errors of all links."""
    states = [known("nvmlDeviceGetNvLinkState", handle, link) for link in range(_links(nvml))]
    up = [link for link, state in enumerate(states) if state == 1]
    kinds = [getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}", None) for name in ("REPLAY", "RECOVERY", "CRC_FLIT")]
    counts = [
        known("nvmlDeviceGetNvLinkErrorCounter", handle, link, kind)
        for link in up
        for kind in kinds
        if kind is not None
    ]
    return sum(state == 0 for state in states) if up else 0, sum(int(count) for count in counts if count)


def _links(nvml: Any) -> int:
    return int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))


def _same_bus(one: str, other: str) -> bool:
    """0000:3b:00 and 00000000:3B:00.0"""
    return _bus(one) == _bus(other)


def _bus(text: str) -> tuple[str, ...]:
    parts = text.lower().partition(".")[0].split(":")
    return tuple(part.lstrip("0") for part in parts)


def _said(text: str) -> str:
    """Without what is the same in all of them: NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus."""
    return text.partition("): ")[2].partition(", ")[2].strip() or text


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
