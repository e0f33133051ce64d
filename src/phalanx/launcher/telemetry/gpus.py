"""Utilization, memory and errors of this node's GPUs, as reported by the NVIDIA driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from phalanx.cluster import xids
from phalanx.cluster.cluster import Device
from phalanx.diagnose.evidence import Gpu, Xid

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT = 0.6  # seconds for all error queries: a slow driver must not cost utilization and memory
_RECENT = 3600.0  # seconds: older Xids belong to earlier runs

_querying = threading.Lock()  # held during a query; a driver that hangs keeps it forever


async def query(devices: Sequence[Device | None], limit: float, *, health: bool = False) -> list[Gpu | None]:
    """Return one entry per device, None for those that the driver does not report within `limit` seconds.

    Uses a daemon thread, so that a driver that hangs does not block the exit. `health` adds errors, which takes about a
    hundred driver calls per GPU: only for stalled runs.
    """
    nothing: list[Gpu | None] = [None] * len(devices)
    if not any(devices) or not _querying.acquire(blocking=False):
        return nothing
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Gpu | None]] = loop.create_future()

    def deliver(found: list[Gpu | None]) -> None:
        if not answer.done():
            answer.set_result(found)

    def ask() -> None:
        found = nothing
        try:
            found = read(devices, health=True) if health else read(devices)
        except Exception:
            logger.debug("the GPU driver query failed", exc_info=True)
        _querying.release()
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(deliver, found)

    threading.Thread(target=ask, name="driver", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, limit)
    except TimeoutError:
        return nothing


def read(devices: Sequence[Device | None], *, health: bool = False) -> list[Gpu | None]:
    """Return one entry per device, None for those that are not GPUs or not reported. Imports NVML, which leaves a
    thread.
    """
    nothing: list[Gpu | None] = [None] * len(devices)
    if not any(devices):
        return nothing
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # pynvml raises its own types: no package, no driver, or one that does not answer
        logger.debug("NVML is not available", exc_info=True)
        return nothing
    try:
        found = [None if device is None else _one(nvml, device) for device in devices]
        return with_errors(nvml, devices, found, xids.read()) if health else found
    finally:
        nvml.nvmlShutdown()


def _one(nvml: Any, device: Device) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        return Gpu(index=device.index, use=0.0, lost=True)
    except nvml.NVMLError:  # a MIG slice has no utilization
        return None
    return Gpu(index=device.index, use=use, memory=int(used), throttled=_throttled(nvml, handle))


def _throttled(nvml: Any, handle: Any) -> str:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return ""
    heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    power = nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown  # the software power cap is reached by every busy GPU
    return "thermal" if reasons & heat else "power" if reasons & power else ""


# -- errors


def with_errors(
    nvml: Any, devices: Sequence[Device | None], found: Sequence[Gpu | None], reported: Sequence[xids.XidLine]
) -> list[Gpu | None]:
    """Add the errors that the driver and the kernel log report, as far as the time limit allows."""
    ends = time.monotonic() + _HEALTH_TIMEOUT
    ranks = Counter(device.index for device in devices if device is not None)
    known: dict[int, dict[str, Any]] = {}  # several ranks may share one GPU
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
    """Return the errors of a GPU; for a MIG slice, those of its GPU. Values that the driver does not report count as
    none.
    """

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
            Xid(xid.number, round(xid.age, 1), _message(xid.text))
            for xid in reported
            if xid.age <= _RECENT and bus and _same_bus(xid.bus, bus)
        ),
    }
    throttled = _throttled(nvml, handle)
    return {**found, "throttled": throttled} if throttled else found


def _nvlinks(nvml: Any, known: Callable[..., Any], handle: Any) -> tuple[int, int]:
    """Return the number of links that are down while others are up, and the errors of all links."""
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
    """Compare bus addresses such as 0000:3b:00 and 00000000:3B:00.0."""
    return _bus(one) == _bus(other)


def _bus(text: str) -> tuple[str, ...]:
    parts = text.lower().partition(".")[0].split(":")
    return tuple(part.lstrip("0") for part in parts)


def _message(text: str) -> str:
    """Strip the common prefix of a kernel line: NVRM: Xid (PCI:0000:3b:00): 79, pid=…, GPU has fallen off the bus."""
    return text.partition("): ")[2].partition(", ")[2].strip() or text


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
