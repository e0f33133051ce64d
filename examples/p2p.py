"""phalanx run -g 4 examples/p2p.py: from one rank to another: send, recv, isend, irecv, both at once, and a ring"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
after, before = (rank + 1) % world, (rank - 1) % world
mine = torch.tensor([float(rank)])

# Blocking: rank 0 sends, rank 1 waits for it.
x = torch.zeros(1)
if rank == 0:
    dist.send(torch.tensor([42.0]), dst=1)
elif rank == 1:
    dist.recv(x, src=0)
    assert x.item() == 42

# From any rank: recv returns the rank that sent.
if rank == 0:
    senders = {dist.recv(x) for _ in range(world - 1)}
    assert senders == set(range(1, world))
else:
    dist.send(mine, dst=0)
dist.barrier()  # what is sent below is not taken by a recv from anyone

# Started, then waited for: no order of the two can make the ranks wait for each other. A tag tells messages apart.
big, small = torch.zeros(1), torch.zeros(1)
works = [
    dist.isend(mine * 100, dst=after, tag=1),
    dist.isend(mine, dst=after, tag=2),
    dist.irecv(small, src=before, tag=2),
    dist.irecv(big, src=before, tag=1),
]
for work in works:
    work.wait()
assert (big.item(), small.item()) == (before * 100, before)

# The same as one batch: with NCCL one launch for all.
left, right = torch.zeros(1), torch.zeros(1)
batch = [
    dist.P2POp(dist.isend, mine, after),
    dist.P2POp(dist.isend, mine, before),
    dist.P2POp(dist.irecv, left, before),
    dist.P2POp(dist.irecv, right, after),
]
for work in dist.batch_isend_irecv(batch):
    work.wait()
assert (left.item(), right.item()) == (before, after)

# A ring: each number goes once around, and every rank adds what passes: an all_reduce by hand.
total, passing = mine.clone(), mine.clone()
for _ in range(world - 1):
    coming = torch.zeros(1)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, passing, after), dist.P2POp(dist.irecv, coming, before)]
    ):
        work.wait()
    passing = coming
    total += passing
assert total.item() == sum(range(world))

met = f"{left.item():.0f} before me, {right.item():.0f} after me"
print(f"rank {rank} of {world}: {met}, the ring adds up to {total.item():.0f}")
dist.destroy_process_group()
