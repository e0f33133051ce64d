"""How busy the GPUs of this node are, by the driver's word, where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from phalanx.cluster.cluster import Device
from phalanx.diagnose.evidence import Gpu

_asking = threading.Lock()  # held while the driver is asked: by one that hangs, for good


async def asked(devices: Sequence[Device | None], limit: float) -> list[Gpu | None]:
    """Nothing, where the driver does not answer in time. The thread is a daemon: one that hangs keeps nobody from the
    end."""
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
            found = look(devices)
        _asking.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(give, found)

    threading.Thread(target=ask, name="driver", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, limit)
    except TimeoutError:
        return nothing


def look(devices: Sequence[Device | None]) -> list[Gpu | None]:
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
        return [None if device is None else _one(nvml, device) for device in devices]
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
