"""phalanx run -g 4 examples/groups.py: groups in the group: even and odd ranks, by node, first ranks of nodes"""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def add_up(group: dist.ProcessGroup) -> int:
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    return int(total.item())


# Every rank makes every group, in the same order, also those that it is not in.
evens, odds = (dist.new_group(list(range(first, world, 2))) for first in (0, 1))
alike = odds if rank % 2 else evens
assert add_up(alike) == sum(range(rank % 2, world, 2))

# A rank has a number in the world and one in the group. Roots are given as the one or the other.
assert dist.get_group_rank(alike, rank) == rank // 2
root = torch.tensor([rank])
dist.broadcast(root, group=alike, group_src=0)
assert root.item() == dist.get_global_rank(alike, 0)

# Groups of one size, in order.
pairs, _ = dist.new_subgroups(group_size=2)
assert add_up(pairs) == 2 * (rank // 2 * 2) + 1

# By node, also where nodes are uneven: all tell where they are.
nodes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
dist.all_gather(nodes, torch.tensor([int(os.environ["GROUP_RANK"])]))
members = [[r for r in range(world) if nodes[r] == node] for node in sorted({int(n) for n in nodes})]
node, _ = dist.new_subgroups_by_enumeration(members)
firsts = dist.new_group([ranks[0] for ranks in members])

# Add up within each node, then among the nodes' first ranks, then tell the node: as a sum over slow links is done.
total = torch.tensor([rank])
dist.reduce(total, group=node, group_dst=0)
if dist.get_group_rank(node, rank) == 0:
    dist.all_reduce(total, group=firsts)
dist.broadcast(total, group=node, group_src=0)
assert total.item() == sum(range(world))

ours = dist.get_process_group_ranks(node)
print(
    f"rank {rank} of {world}: alike {dist.get_process_group_ranks(alike)}, my node {ours}, all add up to {total.item()}"
)
dist.destroy_process_group()
