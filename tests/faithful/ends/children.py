import multiprocessing

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def produce(queue):
    while True:
        queue.put(torch.randn(8, 16))


queue = multiprocessing.Queue(4)
multiprocessing.Process(target=produce, args=(queue,), daemon=True).start()
for _ in range(5):
    model(queue.get()).sum().backward()
dist.destroy_process_group()
