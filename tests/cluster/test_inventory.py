"""apply_mask: which devices CUDA_VISIBLE_DEVICES selects.

gpu_probe.py read the results in the tables from a real driver (R580) with one GPU. Those that need more GPUs, or MIG,
follow from NVIDIA's documentation.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.cluster import Device
from phalanx.cluster.inventory import Inventory, Slice, apply_mask

A = "GPU-a3da6673-4c1a-2879-a426-2d92d58bd019"
B = "GPU-a3ff0000-0000-0000-0000-000000000002"
C = "GPU-0c000000-0000-0000-0000-000000000003"


def gpu(index: int, uuid: str, **more: str) -> Device:
    return Device("gpu", index, more.get("handle", str(index)), uuid, "H200", more.get("bus", f"0000:0{index}:00.0"))


def mig(index: int, name: str, place: str, parent: str) -> Slice:
    return Slice("mig", index, name, name, "H200 MIG 1g.18gb", f"0000:0{index}:00.0", alias=f"MIG-{parent}/{place}")


THREE = (gpu(0, A), gpu(1, B), gpu(2, C))
M1 = mig(1, "MIG-11111111-0000-0000-0000-000000000000", "3/0", B)
M2 = mig(1, "MIG-12222222-0000-0000-0000-000000000000", "4/0", B)
SLICED = (
    gpu(0, A, handle=A),
    gpu(1, B, handle=""),
    M1,
    M2,
    gpu(2, C, handle=""),
)  # the last one has no slice

MASKS = [
    (None, [A, B, C]),
    ("", []),
    ("-1", []),
    ("0", [A]),
    ("2,0", [C, A]),
    ("0,2,-1,1", [A, C]),
    ("0,99", [A]),
    ("99,0", []),
    ("0,,1", [A]),
    ("0,", [A]),
    (",0", []),
    ("NoDevFiles", []),
    ("none", []),
    # A duplicate selects no device, unless the list ended before it.
    ("0,0", []),
    ("1,0,1", []),
    ("0,1,0,2", []),
    ("0,99,0", [A]),
    (" 0 , 0", []),
    # Parsed like strtol, in 32 bits.
    (" 1", [B]),
    ("1 ", [B]),
    ("+1", [B]),
    ("-0", [A]),
    ("01", [B]),
    ("0x1", [A]),
    ("1gpu,2", [B, C]),
    ("0 1", [A]),
    ("4294967297", [B]),
    ("٣", []),
    # UUIDs, prefixes of them, and variations that CUDA accepts.
    (A, [A]),
    (f"{C},{A}", [C, A]),
    ("GPU-0", [C]),
    ("GPU-a3d,GPU-a3f", [A, B]),
    ("GPU-a3", []),
    ("GPU-0,GPU-a3", [C]),
    ("GPU-", []),
    (f"{A},GPU-a3d", []),
    (f"{A},{A}", []),
    (f"{A},GPU-7,{A}", [A]),
    ("GPU-A3DA6673-4C1A-2879-A426-2D92D58BD019", [A]),
    (A.lower(), []),
    (f" {A}", []),
    (f"{A} ", [A]),
    (f"{A}0", [A]),
    (f"{A}zz", [A]),
    ("GPU-0zz", []),
    ("GPU-0 ", []),
    ("GPU-a-3d-", [A]),
    ("GPU-a3da66734c1a2879a4262d92d58bd019", [A]),
    (A.removeprefix("GPU-"), []),
    # An entry of another kind than the first ends the list.
    (f"0,{B}", [A]),
    (f"{B},0", [B]),
    (f"0,{A}", [A]),
    ("MIG-0", []),
]


@pytest.mark.parametrize(("mask", "uuids"), MASKS)
def test_a_mask_selects_the_gpus_that_cuda_would_select(mask: str | None, uuids: list[str]) -> None:
    assert [device.uuid for device in apply_mask(THREE, mask)] == uuids


SLICED_MASKS = [
    (None, [A, M1.uuid, M2.uuid]),
    ("0", [A]),
    ("1", [M1.uuid]),
    ("0,1", [A, M1.uuid]),
    ("0,2,1", [A]),  # GPU 2 has no slices, so it is not visible
    (B, [M1.uuid]),
    (C, []),
    (M2.uuid, [M2.uuid]),
    (f"{M2.uuid},{M1.uuid}", [M2.uuid, M1.uuid]),
    ("MIG-12", [M2.uuid]),
    ("MIG-1", []),
    (f"{M1.uuid},{M1.uuid}", []),
    (f"MIG-{B}/4/0", [M2.uuid]),
    (f"MIG-{B}/9/0", []),
    (f"{M1.uuid},MIG-{B}/3/0", []),
    (f"{M1.uuid},{A}", [M1.uuid]),
    (f"{A},{M1.uuid}", [A]),
]


@pytest.mark.parametrize(("mask", "uuids"), SLICED_MASKS)
def test_a_sliced_gpu_counts_as_its_slices(mask: str | None, uuids: list[str]) -> None:
    assert [device.uuid for device in apply_mask(SLICED, mask)] == uuids


def test_a_driver_before_r470_names_slices_the_old_way() -> None:
    name = f"MIG-{B}/3/0"
    old = (gpu(1, B, handle=""), mig(1, name, "3/0", B))
    assert [device.uuid for device in apply_mask(old, name)] == [name]


def test_a_gpu_taken_by_number_keeps_that_number_as_its_handle() -> None:
    """With two models, the driver gives UUIDs as handles. For the mask `1`, CUDA decides which device that is."""
    mixed = (gpu(0, A, handle=A), gpu(1, B, handle=B))
    assert [device.handle for device in apply_mask(mixed, None)] == [A, B]
    assert [device.handle for device in apply_mask(mixed, "1")] == ["1"]
    assert [device.handle for device in apply_mask(mixed, B)] == [B]
    assert [device.handle for device in apply_mask(SLICED, "1")] == [M1.uuid]


@given(st.permutations(range(3)), st.integers(1, 3), st.sampled_from(["number", "uuid", "beginning"]))
def test_masks_of_distinct_devices_give_those_in_that_order(order: list[int], length: int, way: str) -> None:
    names = [
        {"number": str(THREE[i].index), "uuid": THREE[i].uuid, "beginning": THREE[i].uuid[:7]}[way]
        for i in order[:length]
    ]
    assert apply_mask(THREE, ",".join(names)) == tuple(THREE[i] for i in order[:length])


@given(st.text(alphabet="0123,-+ GPUMIGabcdef/x", max_size=40))
def test_masks_give_distinct_devices_that_handles_select_again(mask: str) -> None:
    chosen = apply_mask(SLICED, mask)
    assert len({device.uuid for device in chosen}) == len(chosen)
    for device in chosen:
        assert [again.uuid for again in apply_mask(SLICED, device.handle)] == [device.uuid]


def test_gpus_on_the_bus_but_not_in_the_driver_are_gone() -> None:
    bus = ("0000:00:00.0", "0000:01:00.0", "0000:02:00.0")
    assert Inventory(driver=THREE, bus=bus).gone == ()
    assert Inventory(driver=(gpu(0, A, bus=bus[0]), gpu(1, B, bus=bus[2])), bus=bus).gone == (bus[1],)


def test_no_gpu_is_gone_if_the_driver_does_not_answer() -> None:
    assert Inventory(bus=("0000:00:00.0",)).gone == ()
    assert Inventory(bus=("0000:00:00.0",), trouble="version mismatch").gone == ()


def test_gpus_outside_the_mask_are_hidden() -> None:
    assert Inventory(THREE, apply_mask(THREE, "1"), "1").hidden == (THREE[0], THREE[2])
    assert Inventory(SLICED, apply_mask(SLICED, "1"), "1").hidden == (SLICED[0], M2)


@pytest.mark.parametrize(
    ("mask", "refused"),
    [(None, False), ("", True), ("-1", True), ("NoDevFiles", True), ("9", False), ("0", False)],
)
def test_hiding_every_gpu_on_purpose_is_distinguished_from_a_mistake(mask: str | None, refused: bool) -> None:
    assert Inventory(THREE, apply_mask(THREE, mask), mask).refused is refused
