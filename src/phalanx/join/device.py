"""Which device a rank computes on, and which backend suits that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

BOTH = "cpu:gloo,cuda:nccl"


def wanted(device: str | torch.device | None, *, local_rank: int) -> torch.device:
    """`local_rank` as the launcher gave it: 0 for a rank that sees its own device alone."""
    import torch

    if device is not None:
        asked = torch.device(device)
        if asked.type != "cuda" or asked.index is not None:
            return asked
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise DeviceError("a CUDA device was asked for, but there is none", fix='phalanx.init(device="cpu")')
    # A rank that sees its own device alone sees one; ranks that share devices take turns.
    return torch.device("cuda", local_rank % count)


def backend_for(backend: str | None, device: torch.device) -> str:
    import torch.distributed as dist

    if backend is not None:
        return backend
    return BOTH if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def refuse_sharing(device: torch.device, backend: str, devices: Sequence[str | None]) -> None:
    """`devices`: CUDA_VISIBLE_DEVICES of each rank of this node, so that all of them refuse alike."""
    import torch

    if device.type != "cuda" or "nccl" not in backend:
        return
    count, ranks = torch.cuda.device_count(), len(devices)
    if ranks > count and len(set(devices)) < ranks:
        raise DeviceError(
            f"there are {ranks} ranks on this node, but {count} GPU{'s' if count != 1 else ''}: nccl wants one each",
            fix=f'phalanx run -g {count} …, or phalanx.init("gloo"), or phalanx.init(device="cpu")',
        )


def use(device: torch.device) -> None:
    """Before the group forms: what NCCL makes, it makes on the current device."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
