"""many_groups.py FOLDER: the group forms repeatedly, with the objects of a training; all of them are freed.

Each rank writes its number of descriptors and mappings after some of the groups.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from regroup import join
from torch import nn

from phalanx.collectives import registry
from phalanx.collectives.errors import GroupAborted
from phalanx.train.run import Run

GROUPS, WIDTH = 50, 600  # wide enough that gradients are in memory that ranks share


def held() -> list[int]:
    """Return the descriptors and mappings of phalanx, and all descriptors."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:phalanx")
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [maps, sum("memfd:phalanx" in name or "pidfd" in name for name in names), len(names)]


def trained(run: Run) -> int:
    net = run.wrap(nn.Linear(WIDTH, WIDTH, bias=False))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        run.backward(net(torch.ones(1, WIDTH)).sum())
        run.step(opt)
    return Path("/proc/self/maps").read_text().count("memfd:phalanx-region")


def forked() -> None:
    """A child has no part in the group, whatever it does with its copy."""
    if (pid := os.fork()) == 0:
        registry.abort()
        dist.destroy_process_group()
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)


def aborted(run: Run, group: object) -> float:
    """Return the seconds until rank 0 stops waiting for a missing rank after it was interrupted."""
    if run.rank:
        run.group.store.get("aborted")
        return 0.0
    timer = threading.Timer(0.2, registry.abort)
    timer.start()
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    except GroupAborted:
        run.group.store.set("aborted", "")
        return time.monotonic() - begin
    raise AssertionError("it did not wait")


def main() -> None:
    found = []
    for number in range(GROUPS):
        run = join(number, None)
        pair = dist.new_group([0, 1])
        regions = trained(run) if number % 10 == 0 else None
        if number % 10 == 1:
            forked()
        assert run.group.sum(1) == run.world_size
        assert aborted(run, pair) < 30 if number % 10 == 2 else True
        del pair
        run._abandon()
        if number % 10 in (0, 9):
            found.append([regions, held()])
    (Path(sys.argv[1]) / f"end.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
