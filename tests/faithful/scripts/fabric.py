"""Lightning Fabric: launch, setup, backward, a checkpoint."""

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(3, verbose=False)
model, optimizer = fabric.setup(layer := torch.nn.Linear(4, 2), torch.optim.SGD(layer.parameters(), lr=0.1))
for step in range(4):
    loss = model(torch.randn(5, 4)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
fabric.save("fabric.ckpt", {"model": model, "step": step})
print(fabric.global_rank, fabric.world_size, fabric.all_reduce(loss.detach()).item())
