"""phalanx run -g 3 examples/rpc.py: call a function on another rank, and keep objects there: remote call, RRef"""

import os
import warnings

import torch
from torch.distributed import rpc

warnings.filterwarnings("ignore", module=r"torch\.distributed")  # about torch's own affairs
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def double(x: torch.Tensor) -> torch.Tensor:
    """Runs on the rank that is called, and says so."""
    return torch.stack([2 * x, torch.full_like(x, rpc.get_worker_info().id)])


class Counter:
    """Lives on one rank; the others hold references to it."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def main() -> None:
    other = f"worker{(rank + 1) % world}"

    # Wait for the result. An exception there would be raised here.
    doubled, where = rpc.rpc_sync(other, double, (torch.tensor(float(rank)),))
    assert (doubled.item(), where.item()) == (2.0 * rank, (rank + 1) % world)

    # Continue, and wait later.
    futures = [rpc.rpc_async(other, double, (torch.tensor(float(n)),)) for n in range(10)]
    assert [future.wait()[0].item() for future in futures] == [2.0 * n for n in range(10)]

    # The result stays there; this rank holds a reference to it (RRef).
    counter = rpc.remote(other, Counter)
    assert counter.owner_name() == other
    for amount in range(5):
        counted = counter.rpc_sync().add(amount)
    assert counter.to_here().value == counted == 10

    print(f"rank {rank} of {world}: {other} says 2 x {rank} = {doubled.item():.0f}, its counter for me is at {counted}")


if __name__ == "__main__":
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    main()
    rpc.shutdown()  # waits until all ranks are done
