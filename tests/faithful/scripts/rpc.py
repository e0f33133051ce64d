"""torch.distributed.rpc: calls, remote references, futures, a graceful shutdown."""

import os

import torch
from torch.distributed import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count


def double(tensor):
    return tensor * 2


if __name__ == "__main__":
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    other = f"worker{(rank + 1) % size}"
    print(rpc.rpc_sync(other, double, args=(torch.arange(3.0),)).tolist())
    counter = rpc.remote(other, Counter)
    futures = [counter.rpc_async().add(number) for number in (1,)]
    print([future.wait() for future in futures], counter.rpc_sync().add(5), counter.owner().name)
    try:
        rpc.rpc_sync(other, int, args=("no number",))
    except ValueError as error:
        print("remote error", str(error).splitlines()[0][:40])
    del counter
    rpc.shutdown()
    print("shut down")
