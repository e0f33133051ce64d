"""A driver that does not answer blocks nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster import xids
from phalanx.cluster.cluster import Device
from phalanx.diagnose.evidence import Gpu, Xid
from phalanx.launcher.telemetry import gpus


def test_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def read(devices: Sequence[Device | None]) -> list[Gpu | None]:
        released.wait(20)
        return [Gpu(index=0, use=1.0)] * len(devices)

    monkeypatch.setattr(gpus, "read", read)
    device = Device("gpu", 0, "0", "", "")
    began = time.monotonic()
    assert asyncio.run(gpus.query([device], 0.1)) == [None]
    assert asyncio.run(gpus.query([device], 0.1)) == [None]  # it is not queried again meanwhile
    assert time.monotonic() - began < 5
    released.set()
    while gpus._querying.locked():
        time.sleep(0.01)
    assert asyncio.run(gpus.query([device], 5.0)) == [Gpu(index=0, use=1.0)]
    assert asyncio.run(gpus.query([None], 5.0)) == [None]


class NotSupported(Exception):
    """Raised like NVMLError: for slices, consumer cards, old drivers."""


def refuse(*_: Any) -> Any:
    raise NotSupported


def driver(**known: Any) -> Any:
    """Return a fake NVML that supports nothing else."""
    names = ("HandleByIndex", "RemappedRows", "TotalEccErrors", "PciInfo", "RetiredPagesPendingStatus")
    names += ("PcieReplayCounter", "NvLinkState", "NvLinkErrorCounter", "CurrentClocksThrottleReasons")
    asked: dict[str, Any] = {f"nvmlDeviceGet{name}": refuse for name in names}
    asked |= {f"nvmlDeviceGet{name}": value for name, value in known.items()}
    reasons = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    slow = {f"nvmlClocksThrottleReason{name}": 1 << bit for bit, name in enumerate(reasons)}
    errors = {f"NVML_NVLINK_ERROR_DL_{name}": bit for bit, name in enumerate(("REPLAY", "RECOVERY", "CRC_FLIT"))}
    return SimpleNamespace(NVMLError=NotSupported, NVML_NVLINK_MAX_LINKS=4, **slow, **errors, **asked)


CARD = Device("gpu", 3, "3", "", "", bus="00000000:3b:00.0")
PLAIN = Gpu(index=3, use=1.0)


def test_errors_of_a_gpu() -> None:
    nvml = driver(
        HandleByIndex=lambda index: index,
        RemappedRows=lambda _: (0, 1, 1, 1),
        TotalEccErrors=lambda handle, kind, which: 2,
        PcieReplayCounter=lambda _: 40,
        NvLinkState=lambda handle, link: 0 if link == 1 else 1,
        NvLinkErrorCounter=lambda handle, link, kind: 5 if (link, kind) == (2, 0) else 0,
        CurrentClocksThrottleReasons=lambda _: 2,
    )
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    reported = [
        xids.XidLine(79, "0000:3b:00", 3.0, line),
        xids.XidLine(48, "0000:3b:00", 1e6, line),  # of a run before
        xids.XidLine(48, "0000:5e:00", 3.0, line),  # of another GPU
    ]
    (found,) = gpus.with_errors(nvml, [CARD], [PLAIN], reported)
    assert found == Gpu(
        index=3,
        use=1.0,
        throttled="thermal",
        ecc=2,
        remap_pending=True,
        remap_failed=True,
        nvlink_down=1,
        nvlink_errors=5,
        pcie_replays=40,
        xids=(Xid(79, 3.0, "pid=1, GPU has fallen off the bus."),),
    )


def test_what_the_driver_does_not_support_is_no_error() -> None:
    part = Device("mig", 3, "MIG-1", "", "")
    one, other = gpus.with_errors(driver(), [part, part], [None, None], [])
    assert one == other == Gpu(index=3, use=-1.0, shared=True)
    half = driver(HandleByIndex=lambda index: index, TotalEccErrors=lambda handle, kind, which: 1)
    shared, none = gpus.with_errors(half, [CARD, None], [Gpu(index=3, use=0.5), None], [])
    assert (shared, none) == (Gpu(index=3, use=0.5, ecc=1), None)
    lost = Gpu(index=3, use=0.0, lost=True)
    assert gpus.with_errors(half, [CARD], [lost], []) == [lost]
