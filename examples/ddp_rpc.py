"""phalanx run -g 3 examples/ddp_rpc.py: all train with DDP but the last, which holds a table for them"""

import logging
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", module=r"torch\.distributed")  # about torch's own affairs
logging.getLogger("torch.distributed.optim").setLevel(logging.ERROR)  # that it will not compile the optimizer

WORDS, STEPS = 20, 40
HOLDER = "holder"  # the name of the last rank
torch.manual_seed(0)
table = nn.Embedding(WORDS, 8)  # every rank has one; the holder's is used


def get_table() -> nn.Embedding:
    return table


def get_parameters() -> list[rpc.RRef]:
    return [rpc.RRef(p) for p in table.parameters()]


def train(rank: int, world: int, trainers: dist.ProcessGroup) -> None:
    # The dense part is on these ranks, and DDP keeps it the same on all.
    remote = rpc.remote(HOLDER, get_table)
    dense = DistributedDataParallel(nn.Linear(8, 2), process_group=trainers)
    parameters = rpc.rpc_sync(HOLDER, get_parameters) + [rpc.RRef(p) for p in dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.NAdam, parameters, lr=0.03)
    chance = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (64,), generator=chance)
        with autograd.context() as context:  # gradients are the context's own; they go back over the network
            loss = nn.functional.cross_entropy(dense(remote.rpc_sync().forward(words)), words % 2)
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    length = sum(p.square().sum() for p in dense.parameters()).sqrt()
    seen = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, the dense parameters have length {length:.5f}"
    print(f"rank {rank} of {world}: trainer, {seen}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    holds = rank == world - 1
    rpc.init_rpc(HOLDER if holds else f"trainer{rank}", rank=rank, world_size=world)
    trainers = dist.new_group(list(range(world - 1)))
    before = table.weight.detach().clone()
    if not holds:
        train(rank, world, trainers)
    rpc.shutdown()  # waits until all ranks are done
    if holds:
        trained = (table.weight != before).any(1).sum().item()
        print(f"rank {rank} of {world}: holder, {trained} of {WORDS} rows of the table were trained")
    dist.destroy_process_group()
