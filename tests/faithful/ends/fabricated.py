import os

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
layer = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
for _ in range(4):
    fabric.backward(model(torch.randn(5, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
fabric.barrier()
