"""Which devices, local rank and variables a worker gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.launch_context import detect_context
from phalanx.cli.options import parse_run
from phalanx.cli.planning import make_plan
from phalanx.cluster import nvidia, sharing
from phalanx.cluster.cluster import Device, Slot
from phalanx.cluster.inventory import Inventory
from phalanx.cluster.placement import Seat
from phalanx.launcher.plan import DeviceVisibility, Plan, SpareWorkers
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


def test_spares_on_slices_of_a_gpu_claim_different_hosts_one_after_another(tmp_path: Path) -> None:
    """The second spare gets the local rank that the first had at its start, which keeps its variables."""
    slices = [Slot(Device("mig", 0, f"MIG-{n}", f"MIG-{n}", "a slice")) for n in range(3)]
    options = parse_run(["-g", "2", "--spares", "1", "--cpu", __file__], {})
    plan = make_plan(options, {}, detect_context(options, {}, str(tmp_path)))
    ranks = tuple(placements.seat(rank, 2, slices[rank]) for rank in range(2))
    spares = SpareWorkers(count=1, slots=(slices[2],))
    plan = replace(plan, group=replace(plan.group, seats=ranks, spares=spares))

    def host(local_rank: int, slot: Slot, folder: str) -> str:
        return _environment(plan, placements.seat(2, 2, slot, local_rank=local_rank), folder)[sharing.HOST]

    workers = [(0, slices[0], "0"), (1, slices[1], "1"), (2, slices[2], "spare.2"), (2, slices[0], "spare.3")]
    assert len({host(*worker) for worker in workers}) == len(workers)


def test_a_rank_that_has_a_gpu_for_itself_gets_the_variables_of_the_ranks_that_share_one(tmp_path: Path) -> None:
    """Ranks with NCCL_HOSTID exchange their state by shared memory: with others they would not find it."""
    gpus = [Slot(Device("gpu", n, str(n), f"GPU-{n}", "a GPU")) for n in range(2)]
    options = parse_run(["-g", "3", "--cpu", __file__], {})
    plan = make_plan(options, {}, detect_context(options, {}, str(tmp_path)))
    ranks = tuple(placements.seat(rank, 3, gpus[rank % 2]) for rank in range(3))
    plan = replace(plan, group=replace(plan.group, seats=ranks))
    environs = [_environment(plan, seat, str(seat.local_rank)) for seat in ranks]
    assert len({environ[sharing.HOST] for environ in environs}) == 3
    assert {environ["NCCL_SOCKET_IFNAME"] for environ in environs} == {"=lo"}


@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_ranks_that_share_a_gpu_can_be_reached_by_nodes_that_join_later(nodes: str, tmp_path: Path) -> None:
    """A rank keeps the variables of its start, when its node may still be the only one."""
    gpu = Slot(Device("gpu", 0, "0", "GPU-0", "a GPU"))
    environ = {"PHALANX_TOKEN": "0" * 64}
    options = parse_run(["-n", nodes, "--master", "127.0.0.1:1", "-g", "2", "--cpu", __file__], environ)
    plan = make_plan(options, environ, detect_context(options, environ, str(tmp_path)))
    count = 1 if nodes == "1:2" else 2
    ranks = tuple(Seat(placements.placement(rank, 2 * count, node_count=count), gpu) for rank in range(2))
    plan = replace(plan, group=replace(plan.group, seats=ranks))
    for seat in ranks:
        found = _environment(plan, seat, str(seat.local_rank))
        assert [name for name in found if name.startswith("NCCL_")] == [sharing.HOST]


def test_ranks_that_share_a_gpu_keep_the_settings_of_the_allocator_and_get_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Device("gpu", 0, "0", "GPU-0", "a GPU", memory=24 << 30)
    monkeypatch.setattr(nvidia, "survey", lambda environ: Inventory((gpu,), (gpu,)))
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    options = parse_run(["-g", "2", "--share-gpu", "--spares", "1", __file__], environ)
    plan = make_plan(options, environ, detect_context(options, environ, str(tmp_path)))
    found = {name: value for name, value in plan.environ.items() if "ALLOC_CONF" in name}
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.438"}


def _environment(plan: Plan, seat: Seat, folder: str) -> dict[str, str]:
    return plan.environment(
        seat, attempt=0, run="run", folder="/run", rank_folder=f"/run/attempt_0/{folder}", port=1, line="", memory=""
    )
