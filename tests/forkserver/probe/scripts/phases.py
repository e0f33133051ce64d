"""Rank 0 stays in each phase until its own status shows it; then rank 1 joins the collective. phases.py FOLDER"""

import contextlib
import io
import json
import os
import pathlib
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from phalanx.collectives import registration

FOLDER = pathlib.Path(sys.argv[1])
RANK = int(os.environ["RANK"])
PROBE = sys.modules["_phalanx_forkserver.probe.probe"].current
REPORT = sys.modules["_phalanx_forkserver.probe.report"]
SLOT = sys.modules["_phalanx_forkserver.board.status_slot"]
OWN = PROBE._sampler._slot
MOST = 30  # seconds until the test fails because the status never shows the phase

seen = {}


def read():
    return SLOT.read(OWN._memory, OWN._base // SLOT.SIZE)


@contextlib.contextmanager
def stay(name, phase, called=None):
    """Keep rank 0 inside until its status shows `phase` and the call that it waits in."""
    go = threading.Event()

    def watch():
        end = time.monotonic() + MOST
        while time.monotonic() < end:
            text = read().text
            if text.get("phase") == phase and (called is None or text.get("call", {}).get("op") == called):
                break
            time.sleep(0.02)
        seen[name] = {"page": read()._asdict(), **REPORT.full(1.0)}
        (FOLDER / name).touch()
        go.set()

    watcher = threading.Thread(target=watch, name=f"watch {name}")
    if RANK == 0:
        watcher.start()
    yield go
    if RANK == 0:
        watcher.join()


def late(name):
    """Keep rank 1 out until rank 0 has been seen."""
    while RANK == 1 and not (FOLDER / name).exists():
        time.sleep(0.02)


with stay("join", "join", "init_process_group"):
    late("join")
    dist.init_process_group("gloo")
half = dist.new_group([0, 1])
tensor = torch.ones(3, 4)
dist.all_reduce(tensor)
with stay("reduced", "collective", "all_reduce"):
    late("reduced")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
with stay("received", "collective", "recv"):
    late("received")
    if RANK == 0:
        dist.recv(tensor, src=1, group=half, tag=5)
    else:
        dist.send(tensor, 0, group=half, tag=5)
with stay("monitored", "collective", "monitored_barrier"):
    late("monitored")
    dist.monitored_barrier()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
first, second = torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())
for _ in range(5):
    model(tensor).sum().backward()
    for optimizer in (first, second):
        optimizer.step()
with stay("bucket", "collective", "all_reduce"):
    late("bucket")
    model(tensor).sum().backward()
with stay("work", "collective", "broadcast"):
    late("work")
    dist.broadcast(tensor, 1, async_op=True).wait()

# The same with a phalanx group, which torch does not record.
registration.register()
shm = dist.new_group(backend="shm")
dist.all_reduce(tensor, group=shm)
with stay("shm reduced", "collective", "all_reduce"):
    late("shm reduced")
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=shm)
with stay("shm work", "collective", "broadcast"):
    late("shm work")
    dist.broadcast(tensor, 1, group=shm, async_op=True).wait()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2), process_group=shm)
for _ in range(2):  # in the second iteration DDP rebuilds its buckets
    model(tensor).sum().backward()
with stay("shm bucket", "collective", "all_reduce"):
    late("shm bucket")
    model(tensor).sum().backward()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        here.wait()
        return index


class Slow(torch.nn.Module):
    def forward(self, x):
        here.wait()
        return x


class Back(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        here.wait()
        return gradient


class Plain(torch.optim.Optimizer):
    def step(self):
        here.wait()


class Weighty:
    def __reduce__(self):
        here.wait()
        return str, ()


def spin():
    while not here.is_set():
        pass


leaf = torch.ones(1, requires_grad=True)
if RANK == 0:
    with stay("data", "data") as here:
        list(DataLoader(Numbers()))
    with stay("forward", "forward") as here:
        Slow()(tensor)
    with stay("backward", "backward") as here:
        Back.apply(leaf).backward()
    with stay("optimizer", "optimizer") as here:
        Plain([leaf], {}).step()
    with stay("checkpoint", "checkpoint") as here:
        torch.save(Weighty(), io.BytesIO())
    with stay("idle", "idle") as here:
        spin()
    before, end = read().phases["sleep"], time.monotonic() + MOST
    while read().phases["sleep"] == before and time.monotonic() < end:
        time.sleep(0.5)
    seen["sleep"] = {"before": seen["idle"]["page"]["phases"]["sleep"], "spun": before, "slept": read().phases["sleep"]}
    large = [
        dist.all_reduce(torch.ones(1), group=dist.new_group([0], use_local_synchronization=True)) for _ in range(20)
    ]
    seen["size"] = len(json.dumps(REPORT.full()))
    seen["threads"] = [thread.name for thread in threading.enumerate()]
    (FOLDER / "seen.json").write_text(json.dumps(seen))
dist.barrier()
