"""Plain PyTorch, data parallel: points on two spirals, and a small network that learns to tell them apart."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def spirals(points: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    turn = torch.rand(points, generator=chance).sqrt() * 9.4
    arm = torch.randint(2, (points,), generator=chance)
    angle = turn + arm * torch.pi
    place = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 9.4
    return place + torch.randn(points, 2, generator=chance) * 0.02, arm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--fail", action="store_true", help="rank 1 meets an error, as ranks do")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world}, pid {os.getpid()}")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    points, arms = spirals(512, seed=1 + rank)
    for step in range(options.steps + 1):
        loss = nn.functional.cross_entropy(ddp(points), arms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and rank == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")
        if options.fail and step == 100 and rank == 1:
            raise RuntimeError("this rank has read a broken sample")

    points, arms = spirals(2000, seed=0)
    right = (model(points).argmax(1) == arms).float().mean()
    if rank == 0:
        print(f"{right:.1%} of points it has never seen are told apart")
    # The wrapper goes before the group: torch may wait for itself for ever when it is the last to hold the group.
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
