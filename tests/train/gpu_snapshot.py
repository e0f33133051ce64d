"""Run by hand on a machine with an NVIDIA GPU: python tests/train/gpu_snapshot.py

One process, one GPU. Takes snapshots of state on the GPU into memory that another process holds, loads them again and
compares them bit for bit. Measures how long the training thread is blocked, relative to one copy of the state to pinned
memory. The last snapshot is copied during a forward and a backward. Fails if something differs, if the memory could not
be pinned, or if the thread is blocked for a copy.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from torch import nn

import phalanx
from phalanx.launcher.agent import snapshot_memory
from phalanx.train.snapshot.snapshots import Snapshots
from phalanx.worker.snapshot_memory import SnapshotMemoryClient


def serve(writing: int) -> None:
    async def wait() -> None:
        held = snapshot_memory.SnapshotMemory(lambda pid: True, requested=True)
        os.write(writing, held.name.encode())
        await asyncio.Event().wait()

    asyncio.run(wait())


def main() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        serve(writing)
    try:
        check(os.read(reading, 100).decode())
    finally:
        os.kill(pid, signal.SIGKILL)


def check(name: str) -> None:
    run = phalanx.Run(phalanx.init())
    for how in ("ddp", "fsdp"):
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).to(run.device)
        net = run.wrap(model, how)
        opt = torch.optim.AdamW(model.parameters())
        kept = {"model": model, "opt": opt}
        snapshots = Snapshots(run.group, SnapshotMemoryClient(name, how))
        x = torch.randn(64, 2048, device=run.device)

        def step(net: nn.Module = net, opt: torch.optim.Optimizer = opt, x: torch.Tensor = x) -> None:
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        held = []
        for number in range(8):
            step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            while not snapshots.save(number, kept, {"epoch": number}):  # memory is being allocated
                assert not snapshots.off
                snapshots.wait()
            held.append(time.perf_counter() - begin)
            snapshots.wait()
        step()
        there = [one.clone() for one in tensors(model, opt)]
        assert snapshots.save(8, kept, {"epoch": 8})
        snapshots.forward()
        net(x).square().mean().backward()
        begin = time.perf_counter()
        snapshots.update()
        late = time.perf_counter() - begin
        opt.step()  # the snapshot differs from the current state
        opt.zero_grad()
        snapshots.wait()
        copies = []
        pinned = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in there]
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for target, one in zip(pinned, there, strict=True):
                target.copy_(one, non_blocking=True)
            torch.cuda.synchronize()
            copies.append(time.perf_counter() - begin)
        found = snapshots.newest()
        assert found is not None
        assert snapshots.load(found, kept) == {"epoch": 8}
        same = all(torch.equal(one, other) for one, other in zip(tensors(model, opt), there, strict=True))
        size = sum(one.nbytes for one in there)
        pins = all(writer._buffer._pinned for writer in snapshots._writer.memories)
        ratio = statistics.median(held[2:]) / statistics.median(copies)
        print(
            f"{how}: {size / 2**30:.2f} GiB, held {statistics.median(held[2:]) * 1e3:.2f} ms "
            f"({ratio:.2f} of a copy of {statistics.median(copies) * 1e3:.1f} ms), the first two "
            f"{held[0] * 1e3:.0f} and {held[1] * 1e3:.0f} ms; the update waited {late * 1e3:.1f} ms; "
            f"the same {same}, pinned {pins}"
        )
        assert same
        assert pins
        assert ratio < 1
        snapshots.close()
    run.group.close()


def tensors(model: nn.Module, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [*model.parameters(), *(value for state in opt.state.values() for value in state.values())]
    return [(one.to_local() if hasattr(one, "to_local") else one).detach() for one in found]


if __name__ == "__main__":
    main()
