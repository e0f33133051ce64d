import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first = dist.new_group([0])
unused = dist.new_group()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2), group=first)
dist.barrier()
