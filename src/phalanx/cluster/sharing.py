"""Several ranks on one GPU: the environment in which NCCL and torch allow that.

NCCL rejects two ranks on one device of one host ("Duplicate GPU detected"), and treats the MIG slices of a GPU as one
device. It accepts ranks that claim different hosts (`NCCL_HOSTID`), and connects them with its network transport.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from phalanx.cluster.cluster import Slot

HOST = "NCCL_HOSTID"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
FRACTION = "per_process_memory_fraction"
ROOM = 1 << 30  # bytes of GPU memory for the CUDA context, kernels and NCCL buffers of a process


def most(slots: Sequence[Slot]) -> int:
    """Return the largest number of ranks on one device."""
    devices = [slot.device for slot in slots if slot.device is not None]
    return max(map(devices.count, devices), default=0)


def for_all(slots: Sequence[Slot], environ: Mapping[str, str], spares: int = 0) -> dict[str, str]:
    """Return variables for all workers of this node: each gets an equal share of the memory.

    `environ`: what the workers inherit. The user's own settings of the allocator are kept, and so is a limit in them.
    """
    if most(slots) < 2:
        return {}
    devices = [slot.device for slot in slots if slot.device is not None]
    kinds = set(devices)
    each = -(-spares // len(kinds))  # spares on one device, at most
    fraction = min(_fraction(device.memory, devices.count(device), each) for device in kinds)
    # torch reads the first that is set. The limit is added to both, so their order does not matter.
    found = [name for name in ALLOCATOR if name in environ] or ALLOCATOR[:1]
    return {name: _limited(environ.get(name, ""), fraction) for name in found}


def _fraction(memory: int, ranks: int, spares: int) -> float:
    """Return the part of a device's memory that the allocator of one rank may use."""
    # The allocator's limit leaves out what CUDA and NCCL use, which is about the same for each process, however small
    # the GPU. On a very small one, half of the memory is still for tensors. 0: the driver does not tell the size.
    room = min(ROOM * (ranks + spares) / memory, 0.5) if memory else 0.1
    return (1 - room) / ranks


def _limited(settings: str, fraction: float) -> str:
    """Add a limit to settings of torch's allocator, unless they have one."""
    if FRACTION in settings:
        return settings
    return ",".join(filter(None, [settings.strip(" ,"), f"{FRACTION}:{fraction:.3f}"]))


def for_one(slots: Sequence[Slot], *, worker: str, one_node: bool) -> dict[str, str]:
    """Return variables for one worker. All workers of a node get them if two of its slots are on one GPU.

    `slots`: all slots that ranks and spares of its node may use. `worker`: a number that is unique among concurrent
    workers. A local rank is not: a spare keeps its variables when it gets the rank of a dead worker. `one_node`: there
    will never be another one, which could not reach loopback.
    """
    gpus = [slot.device.index for slot in slots if slot.device is not None]
    if len(set(gpus)) == len(gpus):
        return {}
    host = {HOST: f"{os.uname().nodename}/{worker}"}
    return {**host, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"} if one_node else host
