"""phalanx run -g 2 --stdin 0 examples/breakpoint.py: rank 0 stops in the debugger, the others wait: p total, then c"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
dist.breakpoint(rank=0)  # `up` shows this line; `c` goes on, on every rank
print(f"rank {rank} of {world}: after the breakpoint, total {total.item():.0f}")
dist.destroy_process_group()
