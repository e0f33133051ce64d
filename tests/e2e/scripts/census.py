"""census.py DIR: sums over the world, over each node and over the first ranks of nodes, to DIR/<rank>.json."""

import json
import os
import sys

import torch
import torch.distributed as dist

import phalanx

dist.init_process_group("gloo")
here = phalanx.topology()
local, leaders = here.local_group(), here.leader_group()


def total(group=None):
    number = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(number, group=group)
    return number.item()


found = {
    "world": total(),
    "local": total(local),
    "leaders": total(leaders) if here.local_rank == 0 else None,
    "node_rank": here.node_rank,
    "local_rank": here.local_rank,
    "local_ranks": here.local_ranks,
    "leader_ranks": here.leaders,
    "env": dict(os.environ),
}
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
