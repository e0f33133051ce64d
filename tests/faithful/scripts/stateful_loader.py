"""torchdata's StatefulDataLoader: stopped and resumed in the middle of an epoch."""

import os

import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def build():
    torch.manual_seed(int(os.environ["RANK"]))
    return StatefulDataLoader(range(20), batch_size=3, shuffle=True, num_workers=1)


if __name__ == "__main__":
    loader = build()
    batches = iter(loader)
    print([next(batches).tolist() for _ in range(3)])
    state = loader.state_dict()
    again = build()
    again.load_state_dict(state)
    print([batch.tolist() for batch in again])
