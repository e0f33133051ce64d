"""DistributedSampler: which rank gets which samples, over epochs, with an uneven end."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.arange(21))
for drop_last in (False, True):
    sampler = DistributedSampler(data, shuffle=True, seed=7, drop_last=drop_last)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        print(drop_last, epoch, [batch[0].tolist() for batch in DataLoader(data, batch_size=4, sampler=sampler)])
torch.manual_seed(3)
print(list(RandomSampler(data)), len(sampler))
dist.destroy_process_group()
