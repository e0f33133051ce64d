"""torch.multiprocessing.spawn inside a rank: its own group, and a child that fails."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def child(index, file, shared):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=1)
    dist.all_reduce(shared)
    shared += 1
    dist.destroy_process_group()


def fails(index):
    raise ValueError(f"child {index}")


if __name__ == "__main__":
    shared = torch.zeros(3).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(child, args=(f"{folder}/store", shared), nprocs=1)
    print(os.environ["RANK"], shared.tolist())
    try:
        mp.spawn(fails, nprocs=1)
    except mp.ProcessRaisedException as error:
        print(str(error).strip().splitlines()[-1])
