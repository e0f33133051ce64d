"""How busy the GPUs of this node are, by the driver's word, where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.cluster.cluster import Device
from phalanx.diagnose.evidence import Gpu


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
