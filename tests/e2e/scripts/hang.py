"""Trains for some steps, then hangs: hang.py KIND FOLDER [BACKEND]. The expected line is marked."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from phalanx.collectives import registration

STEPS = 6
LONG = 4.0  # seconds that a healthy one takes
kind = sys.argv[1]
folder = tempfile.tempdir = sys.argv[2]  # a killed rank cannot remove what multiprocessing has made
backend = sys.argv[3] if len(sys.argv) > 3 else "gloo"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last = rank == size - 1
locked = threading.Lock()
locked.acquire()


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * (STEPS + 4)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4 * STEPS and last and kind == "data":
            locked.acquire()  # here: data
        if index == 4 * STEPS and last and kind == "loader":
            time.sleep(1000)  # here: loader
        return torch.full((4,), float(index))


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return DistributedDataParallel(layers)


def train(net: nn.Module, steps: int = STEPS) -> None:
    """Make steps that are long enough to be counted, and short in total."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.02)


def from_loader() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for batch in DataLoader(Samples(), batch_size=4, num_workers=1 if kind == "loader" else 0):  # here: uses data
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
        time.sleep(0.02)


def uneven() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    for batch in [torch.ones(2, 4)] * (STEPS - last):
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
        time.sleep(0.02)
    dist.all_reduce(torch.ones(1))  # here: uneven


def evaluate() -> None:
    net = model()
    train(net)
    if rank == 0:
        net(torch.ones(2, 4))  # here: evaluate
    dist.all_reduce(torch.ones(3))


def collectives() -> None:
    """Run some common collectives, then the one of this kind."""
    for _ in range(STEPS):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)
    globals()[kind]()


def sleeps() -> None:
    if last:
        time.sleep(1000)  # here: sleeps
    dist.all_reduce(torch.ones(4))


def skipped() -> None:
    if rank != 0:
        dist.all_reduce(torch.ones(4))  # here: skipped
    dist.barrier()


def extra() -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.broadcast(torch.ones(5), 0)  # here: extra
    dist.all_reduce(torch.ones(4))
    dist.barrier()


def operation() -> None:
    if last:
        dist.broadcast(torch.ones(4), 0)  # here: operation
    else:
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def shape() -> None:
    """gloo has nothing to do for an empty tensor; it reports an error for others that do not match."""
    dist.all_reduce(torch.ones(0 if last else 12))  # here: shape
    dist.barrier()


def order() -> None:
    one, other = dist.new_group(), dist.new_group()
    for group in (one, other) if not last else (other, one):
        dist.all_reduce(torch.ones(4), group=group)  # here: order


def send() -> None:
    if rank == 0:
        dist.send(torch.ones(4_000_000), 1)  # here: send
    dist.barrier()


def recv() -> None:
    if rank == 0:
        dist.recv(torch.ones(4), 1)  # here: recv
    dist.barrier()


def both() -> None:
    if rank < 2:
        dist.recv(torch.ones(4), 1 - rank)  # here: both
    dist.barrier()


def stopped() -> None:
    if last:
        os.kill(os.getpid(), signal.SIGSTOP)  # here: stopped
    dist.all_reduce(torch.ones(4))


def backtrack() -> None:
    if last:
        re.match(r"(a+)+$", "a" * 64 + "b")  # here: backtrack
    dist.all_reduce(torch.ones(4))


def loop() -> None:
    """Code that computes, without a step so far, may be in its first step."""
    train(model())
    if last:
        number = 1
        while number:  # here: loop
            number += 1
    dist.all_reduce(torch.ones(4))


def asks() -> None:
    if rank == 0:
        os.dup2(os.pipe()[0], 0)
        input()  # here: asks
    dist.all_reduce(torch.ones(4))


def child() -> None:
    if last:
        subprocess.run(["sleep", "1000"], check=False)  # here: child
    dist.all_reduce(torch.ones(4))


def waits() -> None:
    if last:
        queue.Queue[int]().get()  # here: waits
    dist.all_reduce(torch.ones(4))


def key() -> None:
    if last:
        store = dist.distributed_c10d._get_default_store()
        store.get("nobody has set this")  # here: key
    dist.all_reduce(torch.ones(4))


def fifo() -> None:
    if last:
        path = f"{folder}/fifo"
        os.mkfifo(path)
        open(path).read()  # noqa: SIM115 # here: fifo
    dist.all_reduce(torch.ones(4))


def cut() -> None:
    """Wait until the link is cut."""
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(4))  # here: cut
        time.sleep(0.05)
        if step == 80 and rank == 0:
            print("steps are done", flush=True)


def wake(number: int, frame: object) -> None:
    raise InterruptedError


def goes_on() -> None:
    """Stall until SIGUSR1, then continue."""
    if last:
        signal.signal(signal.SIGUSR1, wake)
        with contextlib.suppress(InterruptedError):
            time.sleep(1000)  # here: goes_on
    for _ in range(40):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.05)


# -- healthy ones


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    while time.monotonic() < end:
        layers(torch.ones(8, 32)).sum().backward()


def healthy() -> None:
    """A long first step, a long checkpoint, an evaluation by one rank, a compilation: all longer than the limit."""
    compute(LONG)
    net = model()
    train(net)
    if rank == 0:
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            torch.save({number: torch.ones(1000) for number in range(200)}, f"{folder}/checkpoint")
    dist.barrier()
    train(net)
    if rank == 0:
        compute(LONG)
    dist.barrier()
    train(net)
    if rank == 0:
        torch.compile(nn.Linear(4, 4), backend=slow)(torch.ones(4))
    dist.barrier()
    train(net)


def slow(graph: torch.fx.GraphModule, _: object) -> object:
    compute(LONG)
    return graph.forward


def once() -> None:
    """Hang in the first attempt only."""
    train(model())
    if last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1000)  # here: once
    dist.barrier()


def main() -> None:
    if kind == "absent" and last:
        return
    if backend == "shm":
        registration.register()
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    if kind in ("data", "loader"):
        from_loader()
    elif kind in ("uneven", "evaluate", "loop", "healthy", "once"):
        globals()[kind]()
    else:
        collectives()
    dist.destroy_process_group()


main()
