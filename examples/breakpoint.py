"""phalanx run -g 2 examples/breakpoint.py: rank 0 stops in the debugger, the others wait, up to an hour

Type `up` to get to the line below, `p total` to see a value, `c` to continue, on every rank. `dist.breakpoint(rank=1)`
gives the terminal to another rank, on whatever node; without a terminal it waits for `phalanx attach`.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
dist.breakpoint(rank=0)
print(f"rank {rank} of {world}: after the breakpoint, total {total.item():.0f}")
dist.destroy_process_group()
