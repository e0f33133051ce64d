"""phalanx run -g 3 examples/ddp_rpc.py: ranks 0 and 1 train with DDP, rank 2 holds a table that they look up by RPC"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

WORDS, STEPS = 20, 40
torch.manual_seed(0)
table = nn.Embedding(WORDS, 8)  # the one of rank 2 is used


def get_table() -> nn.Embedding:
    return table


def get_parameters() -> list[rpc.RRef]:
    return [rpc.RRef(p) for p in table.parameters()]


def train(rank: int, trainers: dist.ProcessGroup) -> None:
    # The dense part is here, and kept alike by DDP.
    remote = rpc.remote("rank2", get_table)
    dense = DistributedDataParallel(nn.Linear(8, 2), process_group=trainers)
    parameters = rpc.rpc_sync("rank2", get_parameters) + [rpc.RRef(p) for p in dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    chance = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (64,), generator=chance)
        with autograd.context() as context:  # gradients are the context's own; they go back over the network
            loss = nn.functional.cross_entropy(dense(remote.rpc_sync().forward(words)), words % 2)
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    sums = sum(p.sum().item() for p in dense.parameters())
    print(f"rank {rank} of 3: trainer, loss {losses[0]:.3f} -> {losses[-1]:.3f}, dense parameters add up to {sums:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 3, "two trainers and a table: -g 3"
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world)
    trainers = dist.new_group([0, 1])
    before = table.weight.detach().clone()
    if rank < 2:
        train(rank, trainers)
    rpc.shutdown()  # waits until nobody needs anybody
    if rank == 2:
        print(f"rank {rank} of 3: table, {(table.weight != before).any(1).sum().item()} of {WORDS} rows were trained")
    dist.destroy_process_group()
