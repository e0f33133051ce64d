"""Arguments of collectives: checks tensors, makes them contiguous, and completes torch's options."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from phalanx.collectives.errors import CallRefused

from . import reductions


def check_cpu(tensor: Tensor) -> Tensor:
    """Return the tensor; raise CallRefused if it is not on the CPU."""
    if not tensor.is_cpu:
        raise CallRefused(
            f"a tensor on {tensor.device}: this group supports CPU tensors only",
            'init_process_group("cpu:gloo,cuda:nccl"), or tensor.cpu()',
        )
    return tensor


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous, else a contiguous copy."""
    if check_cpu(tensor).layout is not torch.strided:
        raise CallRefused(
            f"a tensor with layout {tensor.layout}: only all_reduce takes sparse ones", "tensor.to_dense()"
        )
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def view_real(tensors: Sequence[Tensor], op: Any) -> Sequence[Tensor]:
    """View complex tensors as pairs of real numbers."""
    if not tensors or not tensors[0].is_complex():
        return tensors
    if not c10d.supports_complex(op):
        raise CallRefused(f"{reductions.name(op)} of complex numbers: unsupported reduction")
    return [torch.view_as_real(tensor) for tensor in tensors]


def copy_results(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy results to their destinations, without autograd."""
    if pairs:
        with torch.inference_mode():
            for target, source in pairs:
                target.copy_(source)


def check_one_per_rank(name: str, what: str, size: int, tensors: Sequence[Any]) -> None:
    """Raise ValueError unless there is one tensor per rank."""
    if len(tensors) != size:
        raise ValueError(f"{name}: {len(tensors)} {what}s for {size} ranks: expected one per rank")


def check_same(name: str, one: Tensor, other: Tensor) -> None:
    """Raise ValueError unless this rank's input and output have the same size and type."""
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ValueError(
            f"{name}: this rank's own part is {_described(other)} on one side and {_described(one)} on the other: "
            "invalid tensor size or type"
        )


def check_whole(name: str, what: str, combined: Tensor, one: Tensor, size: int) -> None:
    """Raise ValueError unless `combined` has the type of `one` and is `size` times as large."""
    if combined.numel() != one.numel() * size or combined.dtype != one.dtype:
        raise ValueError(
            f"{name}: the {what} is {_described(combined)}, a part of it {_described(one)}, for {size} ranks: "
            f"the {what} must have the same dtype and be world size times as large"
        )


def split(what: str, size: int, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split a tensor along its first dimension."""
    if not sizes:
        if tensor.dim() and tensor.size(0) % size:
            raise ValueError(
                f"all_to_all_single: the {what}'s {tensor.size(0)} rows do not divide equally across group size {size}"
            )
        return list(tensor.chunk(size)) if tensor.numel() else [tensor] * size
    check_one_per_rank("all_to_all_single", f"{what} split size", size, sizes)
    if sum(sizes) != tensor.size(0):
        raise ValueError(
            f"all_to_all_single: {what} split sizes {list(sizes)} do not add up to its {tensor.size(0)} rows: "
            "Split sizes doesn't match total dim 0 size"
        )
    return list(tensor.split(list(sizes)))


def as_options(kind: type[Any], opts: Any, timeout: timedelta | None = None, **fields: Any) -> Any:
    """Return torch's options object. `opts` may be a single value of it: a root, an operation or a timeout."""
    if isinstance(opts, kind):
        return opts
    options = kind()
    if isinstance(opts, timedelta):
        timeout = opts
    elif opts is not None:
        fields["rootRank" if isinstance(opts, int) else "reduceOp"] = opts
    for name, value in {**fields, "timeout": timeout}.items():
        if value is not None:
            setattr(options, name, value)
    return options


def as_list(tensors: Any) -> Any:
    """Return a list, also for a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
