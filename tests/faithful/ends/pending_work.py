import torch
import torch.distributed as dist

dist.init_process_group("gloo")
work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
other = dist.broadcast(torch.ones(4), 0, async_op=True)
print("never waited for")
