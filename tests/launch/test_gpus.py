"""A driver that does not answer keeps nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from phalanx.cluster.cluster import Device
from phalanx.diagnose.evidence import Gpu
from phalanx.launch import gpus


def test_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def look(devices: Sequence[Device | None]) -> list[Gpu | None]:
        released.wait(20)
        return [Gpu(index=0, use=1.0)] * len(devices)

    monkeypatch.setattr(gpus, "look", look)
    device = Device("gpu", 0, "0", "", "")
    began = time.monotonic()
    assert asyncio.run(gpus.asked([device], 0.1)) == [None]
    assert asyncio.run(gpus.asked([device], 0.1)) == [None]  # it is not asked again meanwhile
    assert time.monotonic() - began < 5
    released.set()
    while gpus._asking.locked():
        time.sleep(0.01)
    assert asyncio.run(gpus.asked([device], 5.0)) == [Gpu(index=0, use=1.0)]
    assert asyncio.run(gpus.asked([None], 5.0)) == [None]
