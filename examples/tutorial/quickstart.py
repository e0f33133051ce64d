"""A training that survives killed ranks, and resumes: the script of docs/quickstart.md."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx


def train(run: phalanx.Run) -> None:
    x = torch.randn(20_000, 16)
    dataset = TensorDataset(x, x[:, :4].sum(1, keepdim=True).sin())
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    opt = torch.optim.AdamW(model.parameters())
    data = run.loader(dataset, global_batch=128, shuffle=True)  # divided among the ranks
    run.keep(model, opt, data)  # what must survive
    ddp = run.wrap(model)  # device and DistributedDataParallel
    for epoch in run.epochs(10):
        for a, b in run.batches(data):
            loss = nn.functional.mse_loss(ddp(a), b)
            run.backward(loss)
            run.step(opt, loss=loss)
        run.print(f"epoch {epoch}: loss {loss:.3f}")


phalanx.main(train)
