"""peer_gone.py RANK [leaves]: that rank raises after all have joined, or exits; the others fail because they lose
it.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == int(sys.argv[1]):
    if sys.argv[2:]:
        sys.exit(0)
    raise ValueError("the reason")
dist.barrier()
