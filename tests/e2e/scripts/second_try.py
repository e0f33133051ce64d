"""second_try.py RANK: that rank exits with code 7 in the first attempt; "attempt A rank R sum S" in the second."""

import os
import sys

import torch
import torch.distributed as dist

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
if attempt == "0" and dist.get_rank() == int(sys.argv[1]):
    sys.exit(7)
number = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(number)
print(f"attempt {attempt} rank {dist.get_rank()} sum {number.item():g}\n", end="", flush=True)
dist.destroy_process_group()
