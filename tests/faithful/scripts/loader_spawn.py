"""DataLoader workers started by spawn: the data set is pickled from __main__."""

import os

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, 12, info.num_workers)


def begin(worker):
    torch.set_num_threads(1)


if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=3, num_workers=1, multiprocessing_context="spawn", worker_init_fn=begin)
    for batch in loader:
        print(os.environ["RANK"], batch.tolist())
