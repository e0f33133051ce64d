"""Chooses the device of a rank, and a backend for it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from phalanx.cluster.sharing import HOST
from phalanx.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

BOTH = "cpu:gloo,cuda:nccl"
SHM = "shm"  # phalanx's own: shared memory within a host, gloo between hosts
OURS = (SHM, "mpi")  # backends of phalanx, for CPU tensors only


def wanted(device: str | torch.device | None, *, local_rank: int) -> torch.device:
    """Return the device of this rank. `local_rank` is the launcher's: 0 for a rank that sees only its own device."""
    import torch

    asked = _parsed(device)
    if asked is not None and asked.type != "cuda":
        return asked
    if asked is None and not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise DeviceError("a CUDA device was asked for, but there is none", fix='phalanx.init(device="cpu")')
    if asked is not None and asked.index is not None:
        if asked.index >= count:
            raise DeviceError(
                f"there is no {asked}: this rank sees {count} GPU{'s' if count != 1 else ''}",
                fix='leave device out: phalanx.init(); or phalanx.init(device="cuda:0")',
            )
        return asked
    # A rank that sees only its own device sees one; ranks that share devices are assigned in turn.
    return torch.device("cuda", local_rank % count)


def _parsed(device: str | torch.device | None) -> torch.device | None:
    import torch

    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device={device!r} is not a device",
            details=[str(error).partition("\n")[0]],
            fix='leave device out: phalanx.init(); or phalanx.init(device="cpu")',
        ) from None


def check_backend(backend: str | None) -> None:
    """Raise UsageError for an unknown backend, before the ranks meet: torch would raise later."""
    from importlib.util import find_spec

    import torch.distributed as dist

    from phalanx.collectives import registration

    registration.register()
    if backend is None:
        return
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    ours = {*dist.Backend._plugins, *(["MPI"] if find_spec("mpi4py") else [])}  # torch itself does not know mpi
    here = [name for name in known if name.upper() in ours or dist.is_backend_available(name)]
    parts = str(backend).lower().split(",")
    for part in parts:
        device, colon, name = part.strip().rpartition(":")
        if name == "mpi" and name not in here:
            raise UsageError("mpi needs mpi4py, which is not installed", fix='pip install "phalanx[mpi]"')
        if name not in here or (len(parts) > 1 and not device) or (colon and not device):
            built = name in known and name not in here
            raise UsageError(
                f"this PyTorch was built without {name}" if built else f"the backend {backend!r} is not known",
                details=[f"expected {' or '.join([*here, *([BOTH] if 'nccl' in here else [])])}"],
                fix='leave it out: phalanx.init(); or phalanx.init("gloo")',
            )
        if name in OURS and (len(parts) > 1 or device not in ("", "cpu")):
            raise UsageError(
                f"the backend {backend!r}: {name} is for the CPU, and cannot be combined with another backend",
                fix=f'leave it out: phalanx.init(); or phalanx.init("{name}"), phalanx.init("{BOTH}")',
            )


def kind(device: str | torch.device | None) -> str:
    """Return the kind of device that this rank uses: "cpu", "cuda"."""
    import torch

    asked = _parsed(device)
    return asked.type if asked is not None else "cuda" if torch.cuda.is_available() else "cpu"


def backend_for(
    backend: str | None, device: torch.device, kinds: Sequence[str] = (), machines: Sequence[str] = ()
) -> str:
    """Return the backend. `kinds`, `machines`: the devices and hosts of all ranks, so that all choose the same."""
    import torch.distributed as dist

    if backend is None:
        if device.type == "cuda" and dist.is_nccl_available():
            return BOTH
        # If other ranks have GPUs, they use gloo beside NCCL. If each rank is on another host, no memory can be shared,
        # and gloo is faster.
        alone = 1 < len(set(machines)) == len(machines)
        return SHM if {device.type, *kinds} == {"cpu"} and not alone else "gloo"
    if backend.lower().rpartition(":")[2] in OURS and device.type != "cpu":
        raise DeviceError(
            f"{backend} works between CPUs, but this rank computes on {device}",
            fix='leave backend out: phalanx.init(); or phalanx.init(device="cpu")',
        )
    if "nccl" in backend.lower() and device.type != "cuda":
        raise DeviceError(
            f"nccl works between GPUs, but this rank computes on {device}",
            fix='leave backend out: phalanx.init(); or phalanx.init("gloo")',
        )
    return backend.lower()


def refuse_sharing(device: torch.device, backend: str, devices: Sequence[str | None]) -> None:
    """Raise DeviceError if ranks would share a GPU with NCCL. `devices`: CUDA_VISIBLE_DEVICES of each rank of the node,
    so that all raise."""
    import torch

    if device.type != "cuda" or "nccl" not in backend or HOST in os.environ:
        return
    count, ranks = torch.cuda.device_count(), len(devices)
    if ranks > count and len(set(devices)) < ranks:
        raise DeviceError(
            f"there are {ranks} ranks on this node, but {count} GPU{'s' if count != 1 else ''}: nccl needs one each",
            fix=f'phalanx run -g {ranks} --share-gpu …, or phalanx.init("gloo"), or phalanx.init(device="cpu")',
        )


def cuda_device(asked: str | torch.device | None) -> int:
    """Return the index of the CUDA device that this rank uses; -1: none."""
    import torch

    found = _parsed(asked)
    if (found is not None and found.type != "cuda") or not torch.cuda.is_available():
        return -1
    own = found.index if found is not None and found.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    return int(own % torch.cuda.device_count())


def warm_up(asked: str | torch.device | None, *, spare: bool) -> threading.Thread | None:
    """Create a CUDA context, and load cuBLAS, NCCL and the kernels of a step, in a thread while this process meets the
    others. Return the thread; None: there is nothing to warm up.

    Wait for it before the script continues: it would invalidate the capture of a CUDA graph. A spare does not know its
    device yet, unless it sees only one: it prepares all of them.
    """
    import torch

    own = cuda_device(asked)
    if own < 0:
        return None
    devices = range(torch.cuda.device_count()) if spare else [own]

    def prepare() -> None:
        with contextlib.suppress(RuntimeError):  # the next use of the device raises it too
            for index in devices:
                _use_once(torch.device("cuda", index))

    thread = threading.Thread(target=prepare, name="phalanx-cuda", daemon=True)
    thread.start()
    return thread


def _use_once(device: torch.device) -> None:
    """Use everything that a training needs and CUDA loads on first use. Draws no random numbers."""
    import torch

    x = torch.ones(16, 16, device=device)
    weight = torch.ones(16, 16, device=device, requires_grad=True)
    torch.nn.functional.linear(x, weight).square().mean().backward()
    torch.optim.AdamW([weight]).step()
    if torch.cuda.nccl.is_available([x]):
        torch.cuda.nccl.all_reduce([x])  # a separate communicator, for one device
    torch.cuda.synchronize(device)


def use(device: torch.device) -> None:
    """Make a device the current one, before the group forms: NCCL uses the current device."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
