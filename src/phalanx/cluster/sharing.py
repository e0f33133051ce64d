"""Several ranks on one GPU: the environment in which NCCL and torch allow that.

NCCL rejects two ranks on one device of one host ("Duplicate GPU detected"), and treats the MIG slices of a GPU as one
device. It accepts ranks that claim different hosts (`NCCL_HOSTID`), and connects them with its network transport.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from phalanx.cluster.cluster import Slot

HOST = "NCCL_HOSTID"


def most(slots: Sequence[Slot]) -> int:
    """Return the largest number of ranks on one device."""
    devices = [slot.device for slot in slots if slot.device is not None]
    return max(map(devices.count, devices), default=0)


def for_all(slots: Sequence[Slot]) -> dict[str, str]:
    """Return variables for all workers of this node: each gets an equal share of the memory."""
    sharers = most(slots)
    return {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{1 / sharers:.3f}"} if sharers > 1 else {}


def for_one(slots: Sequence[Slot], *, worker: str, nodes: int) -> dict[str, str]:
    """Return variables for one worker. All workers of a node get them if two of its slots are on one GPU.

    `slots`: all slots that ranks and spares of its node may use. `worker`: a number that is unique among concurrent
    workers. A local rank is not: a spare keeps its variables when it gets the rank of a dead worker.
    """
    gpus = [slot.device.index for slot in slots if slot.device is not None]
    if len(set(gpus)) == len(gpus):
        return {}
    host = {HOST: f"{os.uname().nodename}/{worker}"}
    return host if nodes > 1 else {**host, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"}
