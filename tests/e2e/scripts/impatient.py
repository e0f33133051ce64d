"""impatient.py SECONDS: an all_reduce with this timeout: "sum S"."""

import datetime
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[1])))
number = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(number)
print(f"sum {number.item():g}\n", end="", flush=True)
