"""Several ranks on one GPU: which ranks share, and the environment of their processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.cluster import sharing
from phalanx.cluster.cluster import Device, Slot
from phalanx.cluster.inventory import Inventory
from phalanx.cluster.slots import choose
from phalanx.errors import DeviceError

GPUS = tuple(Device("gpu", n, str(n), f"GPU-{n}", "NVIDIA H200") for n in range(2))
SLICES = tuple(Device("mig", 0, f"MIG-{n}", f"MIG-{n}", "NVIDIA H200 MIG 1g.18gb") for n in range(2))

OLD, NEW = sharing.ALLOCATOR  # names of the variable that torch's allocator reads


def variables(devices: list[Device | None], one_node: bool = True) -> list[dict[str, str]]:
    slots = [*map(Slot, devices)]
    return [sharing.for_one(slots, worker=f"run/0/{rank}", one_node=one_node) for rank in range(len(devices))]


def test_devices_are_dealt_out_again_where_there_are_more_workers() -> None:
    chosen = choose(Inventory(GPUS, GPUS), asked=5, devices=None, share=True)
    assert [slot.device for slot in chosen] == [GPUS[0], GPUS[1], GPUS[0], GPUS[1], GPUS[0]]
    assert sharing.most(chosen) == 3


def test_named_devices_are_shared_too() -> None:
    chosen = choose(Inventory(GPUS, GPUS), asked=2, devices="1", share=True)
    assert [slot.device for slot in chosen] == [GPUS[1]] * 2


def test_without_the_option_the_refusal_names_it() -> None:
    with pytest.raises(DeviceError) as refused:
        choose(Inventory(GPUS[:1], GPUS[:1]), asked=4, devices=None)
    assert "--share-gpu for 4 ranks on it" in str(refused.value.fix)


@pytest.mark.parametrize("devices", [[GPUS[0]] * 2, list(SLICES), [SLICES[0]] * 3, [GPUS[0], GPUS[1], GPUS[0]]])
def test_all_ranks_claim_different_hosts_if_some_share_a_gpu(devices: list[Device | None]) -> None:
    """Also a rank that has a GPU for itself: all ranks of a node must choose the same way to send their state."""
    environs = variables(devices)
    assert len({environ[sharing.HOST] for environ in environs}) == len(devices)
    assert all(environ["NCCL_SOCKET_IFNAME"] == "=lo" for environ in environs)


def test_between_nodes_the_interface_is_not_loopback() -> None:
    assert all(list(environ) == [sharing.HOST] for environ in variables([GPUS[0]] * 2, one_node=False))


@pytest.mark.parametrize("devices", [list(GPUS), [None, None], [GPUS[0]]])
def test_ranks_that_share_nothing_get_no_variables(devices: list[Device | None]) -> None:
    assert variables(devices) == [{}] * len(devices)
    assert sharing.for_all([Slot(device) for device in devices], {OLD: "backend:native"}) == {}


def test_a_spare_claims_another_host_than_the_spare_before_it() -> None:
    """By then, the earlier spare has the rank of a dead worker, and still the variables from its start."""
    slots = [Slot(SLICES[0]), Slot(SLICES[1])]
    hosts = [
        sharing.for_one(slots, worker=f"run/0/{folder}", one_node=True)[sharing.HOST]
        for folder in ("0", "spare.4", "spare.5")
    ]
    assert len({*hosts}) == 3


def test_a_slice_that_only_a_spare_uses_counts() -> None:
    """With one rank on each of two GPUs, a spare on a second slice of one of them may get the rank on the other."""
    slots = [Slot(SLICES[0]), Slot(GPUS[1]), Slot(SLICES[1])]
    assert sharing.HOST in sharing.for_one(slots, worker="run/0/1", one_node=True)
    assert sharing.for_one(slots[:2], worker="run/0/1", one_node=True) == {}


@pytest.mark.parametrize(
    ("gib", "ranks", "spares", "expected"),
    [
        (140, 2, 0, 0.493),
        (16, 2, 0, 0.438),  # a seventh of an H200
        (24, 4, 0, 0.208),
        (24, 4, 2, 0.188),  # idle spares have a CUDA context too
        (4, 4, 0, 0.125),  # half of a small GPU is still for tensors
        (0, 3, 0, 0.3),  # the driver does not tell the size
    ],
)
def test_the_shares_leave_room_for_what_each_process_uses_besides_tensors(
    gib: int, ranks: int, spares: int, expected: float
) -> None:
    slots = [Slot(replace(GPUS[0], memory=gib << 30))] * ranks
    assert sharing.for_all(slots, {}, spares) == {OLD: f"per_process_memory_fraction:{expected:.3f}"}


def test_the_fullest_and_the_smallest_device_decide() -> None:
    small, large = (replace(gpu, memory=size << 30) for gpu, size in zip(GPUS, (8, 80), strict=True))
    assert sharing.for_all([*map(Slot, (small, large) * 2)], {}) == {OLD: "per_process_memory_fraction:0.375"}
    assert sharing.for_all([*map(Slot, (large, small, large))], {}) == {OLD: "per_process_memory_fraction:0.487"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({OLD: "expandable_segments:True"}, {OLD: "expandable_segments:True,LIMIT"}),
        ({NEW: "expandable_segments:True, "}, {NEW: "expandable_segments:True,LIMIT"}),
        ({OLD: "backend:native", NEW: "a:[1:2,3:4]"}, {OLD: "backend:native,LIMIT", NEW: "a:[1:2,3:4],LIMIT"}),
        ({OLD: "", NEW: "backend:native"}, {OLD: "LIMIT", NEW: "backend:native,LIMIT"}),
        ({OLD: "per_process_memory_fraction:0.8"}, {OLD: "per_process_memory_fraction:0.8"}),
        (
            {NEW: "backend:native,per_process_memory_fraction : 1"},
            {NEW: "backend:native,per_process_memory_fraction : 1"},
        ),
    ],
)
def test_the_limit_is_added_to_the_settings_of_the_user(environ: dict[str, str], expected: dict[str, str]) -> None:
    limit = "per_process_memory_fraction:0.450"
    found = sharing.for_all([Slot(GPUS[0])] * 2, environ)
    assert found == {name: value.replace("LIMIT", limit) for name, value in expected.items()}
