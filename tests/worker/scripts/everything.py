"""Uses every feature of a group, under any launcher. Every rank prints one line if all results are right."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import UsageError

options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
if port := options.pop("store_port", None):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options["store"] = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
adopted = options.pop("adopt", None)
if adopted:
    dist.init_process_group(adopted)
group = phalanx.init(**options)
world = group.world_size
assert (dist.get_rank(), dist.get_world_size()) == (group.rank, world)

ones = torch.ones(3, device=group.device)
dist.all_reduce(ones)
assert ones.tolist() == [world] * 3
assert group.mean(group.rank) == (world - 1) / 2
found = group.sum({"b": torch.tensor([2.0]), "a": 1})
assert found == {"a": world, "b": 2 * world}, found
assert group.mean({"a": 1, "b": group.rank}) == {"a": 1, "b": (world - 1) / 2}
odd: list[object] = [{"b": 1.0}, {"a": 1.0, "b": 1.0}, {}, 1.0]
for reduce in (group.mean, group.max) if world > 1 else ():
    for value in odd:
        with contextlib.suppress(UsageError):
            reduce({"a": 1.0} if group.rank == 0 else value)
            raise AssertionError("different names were not noticed")
assert group.max(torch.tensor(float(group.rank))) == world - 1

received = group.broadcast({"from": group.rank, "w": torch.arange(3.0)}, src=world - 1)
assert received["from"] == world - 1
assert received["w"].tolist() == [0, 1, 2]
for exchange in (group.broadcast, group.gather):
    with contextlib.suppress(UsageError):
        exchange(object() if group.rank == 0 else None)
        raise AssertionError("what cannot be sent was not refused by all")
ranks = group.gather({"rank": group.rank, "pad": "x" * group.rank}, all=True)
assert ranks is not None
assert [one["rank"] for one in ranks] == list(range(world))
assert (group.gather(group.rank) is None) == (group.rank != 0)

group.store.set(f"from {group.rank}", b"\0\xff")
assert all(group.store.get(f"from {rank}") == b"\0\xff" for rank in range(world))
assert group.store.compare_set("once", "", "first") == b"first"
assert group.store.compare_set("never", "expected", "value") == b""

group.store.add("tickets", 2)
group.store.wait(*(f"from {rank}" for rank in range(world)))
group.barrier()
assert group.store.add("tickets", 0) == 2 * world

# Ranks draw the same random numbers until the model is created, then different ones.
same = group.gather(torch.rand(1).item(), all=True)
group.seed_apart()
apart = group.gather((torch.rand(1).item(), torch.rand(1, generator=group.generator).item()), all=True)
assert len(set(same or ())) == 1, same
assert len({number for pair in apart or () for number in pair}) == 2 * world, apart

with group.first() as leads:
    assert leads == (group.local_rank == 0)
assert group.sum(leads) == group.nodes
folder = os.environ.get("JOIN_FOLDER", "")
with group.first(per="world") as leads:
    if folder and leads:
        with open(f"{folder}/fetched", "x") as file:
            file.write("here")
    assert not folder or os.path.exists(f"{folder}/fetched")

local = torch.ones(1, device=group.device)
dist.all_reduce(local, group=group.local_group)
assert local.item() == group.local_world_size
if group.rank == group.topology.local_ranks[0]:
    dist.all_reduce(local, group=group.leader_group)
    assert local.item() == world
else:
    assert group.leader_group is not None  # all ranks create it, the leaders join it

group.barrier()
group.print("printed once")
sys.stdout.write(
    f"rank {group.rank} of {world}, local {group.local_rank} of {group.local_world_size}, "
    f"node {group.node_rank} of {group.nodes}, {group.backend} on {group.device}, by {group.launcher}\n"
)
if adopted:
    dist.destroy_process_group()
