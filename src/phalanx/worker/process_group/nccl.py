"""Leaves NCCL groups that have lost a rank, without waiting for NCCL.

    abort()            in threads: kernels that wait for a peer end at once, the call itself may take long
    forget_groups()    torch has no groups any more, and the next one can form

`ncclCommAbort` ends a waiting `cuda.synchronize()` within 0.1 s, but returns 0.5 s later, and sometimes never. So it
runs in a thread, and its groups are never destroyed: their destructors would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from typing import Any

from phalanx.worker.ending import keep

PATIENCE = 10.0  # seconds: an abort that takes longer does not return
_KEPT_FILES = 8  # descriptors, at most, of a kept group
_aborting: dict[int, float | None] = {}  # id of a kept backend -> when its abort began; None: it has returned
_starting = threading.Lock()


VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_PROPAGATE_ERROR",
)


def prepare() -> None:
    """Set environment variables, before the first group of a process forms.

    Otherwise the watchdog ends the process when a peer is lost, and the monitor when the watchdog does not answer,
    before a new group can form.
    """
    handling, *others = VARIABLES
    os.environ[handling] = "0"  # torchrun and phalanx run set 1
    for variable in others:
        os.environ.setdefault(variable, "0")


def abort() -> None:
    """Abort all communicators of this process, each in a thread. Any thread may call it, more than once."""
    with _starting:
        backends = [backend for backend in _backends() if id(backend) not in _aborting]
        for backend in backends:
            keep(backend)  # so that its id stays unique
            _aborting[id(backend)] = time.monotonic()
    for backend in backends:
        threading.Thread(target=_abort, args=(backend,), name="phalanx-abort", daemon=True).start()


def is_blocked() -> bool:
    """Return whether an abort of a current group has not returned in time: a kernel of the script may never end."""
    now = time.monotonic()
    return any(now - (_aborting.get(id(backend)) or now) > PATIENCE for backend in _backends())


def forget_groups() -> None:
    """Make torch forget all groups, as its `_abort_process_group` does after the abort, without destructing them.

    So each recovery leaves behind what gloo has for a group beside NCCL: seven descriptors and three threads. The limit
    of open files is raised by that, as far as it may be.
    """
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world
    for group in [*world.pg_map]:
        keep(group)
    _allow_more_files(_KEPT_FILES * len(world.pg_map))
    c10d._update_default_pg(None)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


def _allow_more_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        more = soft + count
        resource.setrlimit(resource.RLIMIT_NOFILE, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard))


def _backends() -> list[Any]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_nccl_available():
        return []
    import torch

    found = []
    for group in [*c10d._world.pg_map]:
        with contextlib.suppress(RuntimeError):  # it has none for the GPU
            backend = group._get_backend(torch.device("cuda"))
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            if isinstance(backend, c10d.ProcessGroupNCCL):
                found.append(backend)
    return found


def _abort(backend: Any) -> None:
    """Abort one communicator. Each has its own thread: an abort may wait for all kernels on the device, including those
    of other communicators, which only their own aborts end.
    """
    with contextlib.suppress(RuntimeError):
        backend.abort()
    _aborting[id(backend)] = None
