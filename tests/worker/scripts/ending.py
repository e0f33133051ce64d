"""Ranks that end in the way that the first argument names."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from phalanx.errors import UsageError
from phalanx.worker.process_group.group import WorkerProcessGroup


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


way = sys.argv[1]
if way == "adopted":
    dist.init_process_group("gloo")
group = WorkerProcessGroup.join(timeout=float(os.environ.get("JOIN_TIMEOUT", "60")))
group.barrier()
say(f"ready {group.rank} {os.getpid()}")
if way in ("exception", "within", "exit"):
    if group.rank == 1:
        with group if way == "within" else contextlib.nullcontext():
            if way == "exit":
                sys.exit(3)
            raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(1))
elif way in ("pending", "pending finally", "pending exit"):
    # This rank ends while an operation is pending that never completes.
    if group.rank == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if way == "pending exit":
            sys.exit(3)
        try:
            raise ValueError("rank 1 has had enough")
        finally:
            if way == "pending finally":
                del work
                group.close()
    signal.pause()
elif way == "wrapped":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    kept = [model]  # referenced until the interpreter exits
elif way == "stuck":
    if group.rank == 1:
        signal.pause()
    dist.all_reduce(torch.ones(1))
elif way == "uneven":
    # Rank 0, which hosts the store, ends first.
    if group.rank == 1:
        time.sleep(float(os.environ.get("JOIN_LATE", "1")))
        group.store.set("late", "yes")
    say(f"end {group.rank}")
    sys.exit(0)
elif way == "again":
    group.close()
    with contextlib.suppress(ValueError), WorkerProcessGroup.join() as group:
        assert group.sum(1) == group.world_size
        raise ValueError("of no consequence")
    assert group.closed
    assert not dist.is_initialized()
    group = WorkerProcessGroup.join("gloo")
    other = WorkerProcessGroup.join("gloo", rank=group.rank, world_size=2)  # joins the same group a second time
    assert (other.rank, other.sum(1), other.gather(1, all=True)) == (group.rank, 2, [1, 1])
    for wrong in ({"backend": "cpu:gloo"}, {"rank": 1 - group.rank}, {"world_size": 3}, {"method": "tcp://a:1"}):
        with contextlib.suppress(UsageError):
            WorkerProcessGroup.join(**wrong)
            raise AssertionError(f"{wrong} was not refused")
    other.close()
    assert group.sum(1) == 2
    group.close()
elif way == "adopted":
    assert group.sum(1) == group.world_size
    group.close()
    dist.barrier()  # the group belongs to the script, and still exists
    dist.destroy_process_group()
elif way == "destroyed":
    dist.destroy_process_group()
elif way == "fork":
    group.before_close(lambda: say(f"closed {group.rank}"))
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    assert group.sum(1) == group.world_size
say(f"end {group.rank}")
