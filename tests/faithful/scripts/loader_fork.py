"""DataLoader workers started by fork, persistent, alive at exit."""

import os

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index * index, get_worker_info().id, torch.rand(1).item()


if __name__ == "__main__":
    torch.manual_seed(int(os.environ["RANK"]))
    loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        for squares, worker, drawn in loader:
            print(epoch, squares.tolist(), worker.tolist(), drawn.tolist())
