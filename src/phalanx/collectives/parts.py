"""Tensors as a group is given them: what they have to be like, and their memory in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import reductions
from .errors import CallRefused


def on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cpu:
        raise CallRefused(
            f"a tensor on {tensor.device}: this group is for tensors of the CPU",
            'init_process_group("cpu:gloo,cuda:nccl"), or tensor.cpu()',
        )
    return tensor


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory is in order, else a copy."""
    if on_cpu(tensor).layout is not torch.strided:
        raise CallRefused(
            f"a tensor with layout {tensor.layout}: only all_reduce takes sparse ones", "tensor.to_dense()"
        )
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def real(tensors: Sequence[Tensor], op: Any) -> Sequence[Tensor]:
    """Complex numbers as pairs."""
    if not tensors or not tensors[0].is_complex():
        return tensors
    if not c10d.supports_complex(op):
        raise CallRefused(f"{reductions.name(op)} of complex numbers: there is no such reduction")
    return [torch.view_as_real(tensor) for tensor in tensors]


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """As if it had been written there at once: autograd is not asked."""
    if pairs:
        with torch.inference_mode():
            for to, of in pairs:
                to.copy_(of)


def one_for_each(name: str, what: str, size: int, tensors: Sequence[Any]) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name}: {len(tensors)} {what}s for {size} ranks: there has to be one for each")


def alike(name: str, one: Tensor, other: Tensor) -> None:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ValueError(
            f"{name}: this rank's own part is {_described(other)} on one side and {_described(one)} on the other: "
            "invalid tensor size or type"
        )


def whole(name: str, what: str, all_of_it: Tensor, one: Tensor, size: int) -> None:
    if all_of_it.numel() != one.numel() * size or all_of_it.dtype != one.dtype:
        raise ValueError(
            f"{name}: the {what} is {_described(all_of_it)}, a part of it {_described(one)}, for {size} ranks: "
            f"the {what} has to be of the same type, and world size times as large"
        )


def split(what: str, size: int, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """By rows."""
    if not sizes:
        if tensor.dim() and tensor.size(0) % size:
            raise ValueError(
                f"all_to_all_single: the {what}'s {tensor.size(0)} rows do not divide equally across group size {size}"
            )
        return list(tensor.chunk(size)) if tensor.numel() else [tensor] * size
    one_for_each("all_to_all_single", f"{what} split size", size, sizes)
    if sum(sizes) != tensor.size(0):
        raise ValueError(
            f"all_to_all_single: {what} split sizes {list(sizes)} do not add up to its {tensor.size(0)} rows: "
            "Split sizes doesn't match total dim 0 size"
        )
    return list(tensor.split(list(sizes)))


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
