"""The machine of the measurement."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata

from phalanx.version import __version__

Load = tuple[float, float, float]


@dataclass(frozen=True)
class MachineInfo:
    """Hardware, versions and load: every result is stored with it."""

    date: str
    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str
    accelerate: str
    phalanx: str
    load_before: Load


def machine_info() -> MachineInfo:
    """Describe this machine; called before the first measurement. Does not import torch, to keep this process small."""
    return MachineInfo(
        date=time.strftime("%Y-%m-%d %H:%M %Z"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        accelerate=_version("accelerate"),
        phalanx=__version__,
        load_before=os.getloadavg(),
    )


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        models = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(models, platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
