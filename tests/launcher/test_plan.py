"""Which devices and local rank a worker gets."""

from __future__ import annotations

import pytest

from phalanx.cluster.cluster import Device, Slot
from phalanx.launcher.plan import DeviceVisibility
from tests.kit import placements

GPU = Slot(Device("gpu", 3, "GPU-3", "3", "a GPU"))


@pytest.mark.parametrize(
    ("isolated", "virtual", "slot", "inherited", "expected"),
    [
        (False, False, GPU, None, None),
        (True, False, GPU, None, "handle"),
        (True, False, Slot(), None, ""),
        (False, True, GPU, None, "handle"),
        (False, True, Slot(), None, "1"),  # as torchrun: whether it exists or not
        (False, True, Slot(), "4, 6", "6"),
    ],
)
def test_which_devices_a_worker_sees(
    isolated: bool, virtual: bool, slot: Slot, inherited: str | None, expected: str | None
) -> None:
    visibility = DeviceVisibility(isolated=isolated, virtual_local_rank=virtual)
    seat = placements.seat(1, 2, slot)
    environ = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    if expected == "handle":
        assert slot.device is not None
        expected = slot.device.handle
    assert visibility.visible(seat, environ) == expected
    assert visibility.worker_placement(seat).local_rank == (0 if virtual else 1)
