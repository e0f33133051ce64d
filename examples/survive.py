"""phalanx run -g 3 examples/survive.py --die 2:30: rank 2 is killed during the training, and the others continue

`--die RANK:STEP` kills a rank after a step, once. Another process replaces it, with the state of a living rank. No step
is lost, and the other ranks keep their model and optimizer objects. `phalanx chaos -g 3 --kill-every 2s
examples/survive.py --epochs 50` kills random ranks again and again.
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.demo import idx

entered: list[int] = []  # generations in which this process has called train


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(run: phalanx.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--die", metavar="RANK:STEP", default="", help="kill this rank after that step, once")
    options = parser.parse_args()
    entered.append(run.group.generation)

    images, labels = (t.to(run.device) for t in idx.load(test=True))
    loader = run.loader(TensorDataset(*idx.load()), global_batch=64, shuffle=True)
    model, optimizer = run.once(make)  # made once per process, however often train is called
    run.keep(model, optimizer, loader)
    if run.group.generation:
        run.print(f"the group was formed again, and continues after step {run.steps}")
    ddp = run.wrap(model)
    for _ in run.epochs(options.epochs):
        for x, y in run.batches(loader):
            if options.die == f"{run.rank}:{run.steps}" and not run.group.generation:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.cross_entropy(ddp(x), y)
            run.backward(loss)
            run.step(optimizer, loss=loss)

    with torch.no_grad():
        right = float((ddp(images).argmax(1) == labels).float().mean())
    print(
        f"rank {run.rank} of {run.world_size}: {run.steps} steps, train entered in generation {entered}, "
        f"{right:.1%} of {len(labels)} new digits are correct"
    )


if __name__ == "__main__":
    phalanx.main(train)
