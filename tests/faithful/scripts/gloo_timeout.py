"""A collective that one rank never joins: it times out on the other, and both end."""

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
dist.barrier()
if dist.get_rank() == 0:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        print("timed out" if "imed out" in str(error) else error)
    dist.distributed_c10d._get_default_store().set("over", "")
else:
    dist.distributed_c10d._get_default_store().wait(["over"], datetime.timedelta(seconds=30))
print("ends")
