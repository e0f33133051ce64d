import datetime

import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(3):
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
dist.destroy_process_group()
