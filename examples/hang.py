"""phalanx run -g 3 --stall-timeout 5 examples/hang.py, with --kind skip behind it: a rank that keeps the others waiting

`--kind` is what goes wrong after some good steps; without it nothing does. Five seconds later phalanx says which rank
it is, at which line and why. Ctrl-C ends the run, `--on-hang stop` does so by itself. Meanwhile `phalanx why --stacks`
says it again, and `phalanx attach 2` opens a debugger in rank 2. `--check-collectives` tells `mismatch` at once, and
`phalanx lint examples/hang.py` finds it, and `skip`, without running them.
"""

import argparse
import io
import os
import signal
import threading
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 30


class Samples(Dataset[torch.Tensor]):
    def __init__(self, last: int) -> None:
        self.last, self.lock = last, threading.Lock()

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.last:
            self.lock.acquire()  # as if a thread that reads ahead had never let it go
        with self.lock:
            return torch.full((16,), index / len(self))


def train(batches: Iterable[torch.Tensor]) -> None:
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)


def data() -> None:
    """Rank 2 waits for its data, in a lock of the Dataset."""
    train(DataLoader(Samples(last=40 if rank == 2 else -1), batch_size=4))


def uneven() -> None:
    """Rank 2 has a batch less, and leaves the loop."""
    train(torch.ones(4, 16) for _ in range(STEPS - (rank == 2)))


def skip() -> None:
    """Rank 0 alone comes to a barrier: it should stand behind what is only rank 0's, and not in it."""
    if rank == 0:
        torch.save(model.state_dict(), io.BytesIO())
        dist.barrier()
    train([torch.ones(4, 16)])


def mismatch() -> None:
    """Rank 2 takes what it should add up."""
    if rank == 2:
        dist.broadcast(mean, src=0)
    else:
        dist.all_reduce(mean)


def order() -> None:
    """Two groups of the same ranks, and rank 2 begins with the other one."""
    groups = [dist.new_group(group_desc=name) for name in ("data", "model")]
    for group in reversed(groups) if rank == 2 else groups:
        dist.all_reduce(mean, group=group)


def message() -> None:
    """Rank 0 waits for a message that rank 1 does not send."""
    if rank == 0:
        dist.recv(mean, src=1)
    train([torch.ones(4, 16)])


def stopped() -> None:
    """Rank 2 is stopped: kill -STOP, or Ctrl-Z."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    train([torch.ones(4, 16)])


KINDS = {kind.__name__: kind for kind in (data, uneven, skip, mismatch, order, message, stopped)}
parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=KINDS, help="what goes wrong")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mean = torch.ones(1)

train([torch.ones(4, 16)] * STEPS)
if options.kind:
    KINDS[options.kind]()
dist.barrier()
print(f"rank {rank} of {world}: {STEPS} steps, and no rank hung")
dist.destroy_process_group()
