import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


beats = []


def watch():
    while True:
        time.sleep(0.001)
        beats.append(time.monotonic())  # no torch: Python aborts a daemon thread that is in C++ at exit, everywhere


threading.Thread(target=watch, daemon=True).start()
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()

dist.destroy_process_group()
