import torch
import torch.distributed as dist

dist.init_process_group("mpi")
total = torch.ones(4)
dist.all_reduce(total)
print(total.tolist())
