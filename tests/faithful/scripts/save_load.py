"""torch.save and torch.load: model, optimizer, generator; resumed in the same process."""

import os

import torch

rank = os.environ["RANK"]
torch.manual_seed(0)


def build():
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters())


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
    return loss.item()


model, optimizer = build()
print(train(model, optimizer, 3))
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
torch.save(state, f"checkpoint-{rank}.pt")
print(train(model, optimizer, 2))
model, optimizer = build()
state = torch.load(f"checkpoint-{rank}.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
torch.set_rng_state(state["rng"])
print(train(model, optimizer, 2), sorted(state))
