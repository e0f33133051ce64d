"""Several ranks on one GPU: which ranks share, and the environment of their processes."""

from __future__ import annotations

import pytest

from phalanx.cluster import sharing
from phalanx.cluster.cluster import Device, Slot
from phalanx.cluster.inventory import Inventory
from phalanx.cluster.slots import choose
from phalanx.errors import DeviceError

GPUS = tuple(Device("gpu", n, str(n), f"GPU-{n}", "NVIDIA H200") for n in range(2))
SLICES = tuple(Device("mig", 0, f"MIG-{n}", f"MIG-{n}", "NVIDIA H200 MIG 1g.18gb") for n in range(2))


def variables(devices: list[Device | None], nodes: int = 1) -> list[dict[str, str]]:
    slots = [*map(Slot, devices)]
    return [sharing.for_one(slots, worker=f"run/0/{rank}", nodes=nodes) for rank in range(len(devices))]


def test_devices_are_dealt_out_again_where_there_are_more_workers() -> None:
    chosen = choose(Inventory(GPUS, GPUS), asked=5, devices=None, share=True)
    assert [slot.device for slot in chosen] == [GPUS[0], GPUS[1], GPUS[0], GPUS[1], GPUS[0]]
    assert sharing.most(chosen) == 3
    assert sharing.for_all(chosen) == {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.333"}


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
    assert all(list(environ) == [sharing.HOST] for environ in variables([GPUS[0]] * 2, nodes=2))


@pytest.mark.parametrize("devices", [list(GPUS), [None, None], [GPUS[0]]])
def test_ranks_that_share_nothing_get_no_variables(devices: list[Device | None]) -> None:
    assert variables(devices) == [{}] * len(devices)
    assert sharing.for_all([Slot(device) for device in devices]) == {}


def test_a_spare_claims_another_host_than_the_spare_before_it() -> None:
    """By then, the earlier spare has the rank of a dead worker, and still the variables from its start."""
    slots = [Slot(SLICES[0]), Slot(SLICES[1])]
    hosts = [
        sharing.for_one(slots, worker=f"run/0/{folder}", nodes=1)[sharing.HOST]
        for folder in ("0", "spare.4", "spare.5")
    ]
    assert len({*hosts}) == 3


def test_a_slice_that_only_a_spare_uses_counts() -> None:
    """With one rank on each of two GPUs, a spare on a second slice of one of them may get the rank on the other."""
    slots = [Slot(SLICES[0]), Slot(GPUS[1]), Slot(SLICES[1])]
    assert sharing.HOST in sharing.for_one(slots, worker="run/0/1", nodes=1)
    assert sharing.for_one(slots[:2], worker="run/0/1", nodes=1) == {}
