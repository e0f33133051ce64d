"""Accelerate: prepare, accumulate, gather."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 1)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for (batch,) in data:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())
print(accelerator.num_processes, accelerator.process_index, accelerator.distributed_type)
print(accelerator.gather(loss.detach().reshape(1)).tolist())
accelerator.print("main process only")
accelerator.wait_for_everyone()
accelerator.end_training()
