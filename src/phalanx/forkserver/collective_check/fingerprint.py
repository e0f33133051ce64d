"""What all ranks of a group must agree on in a collective, and how it is described."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

# torch's operators (c10d::allreduce_ …) -> the name that users know, and the argument whose tensors have the same sizes
# on all ranks. Sizes may differ in an all-to-all, and in data that only one rank contributes.
CALLS: dict[str, tuple[str, str]] = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather_into_tensor", "output_tensor"),
    "allgather_coalesced_": ("all_gather_coalesced", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "outputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "inputs"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all_single", "input"),
    "barrier": ("barrier", ""),
    "monitored_barrier_": ("monitored_barrier", ""),
}
_SIZES_DIFFER = ("all_to_all", "all_to_all_single")


class CollectiveCall(NamedTuple):
    """A collective. Hashable, so that its fingerprint is computed once."""

    op: str
    dtype: Any = None
    shapes: tuple[tuple[int, ...], ...] = ()
    reduction: int = -1
    root: int = -1


class CallReader:
    """Reads the arguments of one operator, at their positions in this version of torch."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.op, tensors = CALLS[name]
        where = {argument: at for at, argument in enumerate(arguments)}
        self.group = where["process_group"]
        self._tensors = where.get(tensors, -1)
        self._reduction = where.get("reduce_op", -1)
        self._root = where.get("root_rank", -1)
        self._async = where.get("async_op", -1)

    def waits(self, args: tuple[Any, ...]) -> bool:
        """Return whether the call is synchronous. Arguments that have their default are left out."""
        return self._async < 0 or (len(args) > self._async and not args[self._async])

    def call(self, args: tuple[Any, ...]) -> CollectiveCall:
        """Return the call."""
        tensors = args[self._tensors] if self._tensors >= 0 else ()
        if not isinstance(tensors, (list, tuple)):
            tensors = (tensors,)
        elif tensors and isinstance(tensors[0], (list, tuple)):
            tensors = tensors[0]
        return CollectiveCall(
            self.op,
            tensors[0].dtype if tensors else None,
            tuple([tensor.shape for tensor in tensors]),
            args[self._reduction].op() if self._reduction >= 0 else -1,
            args[self._root] if self._root >= 0 else -1,
        )


def own_call(op: str, tensors: Any, reduction: str, root: int | None) -> CollectiveCall:
    """Return the call of one of phalanx's groups."""
    return CollectiveCall(
        op,
        tensors[0].dtype if tensors else None,
        tuple([tensor.shape for tensor in tensors]),
        _REDUCTIONS.index(reduction) if reduction in _REDUCTIONS else -1,
        -1 if root is None else root,
    )


def fingerprint(call: CollectiveCall) -> int:
    """Return a number that is the same in all processes. It does not depend on the shapes: only the number of elements
    must match.
    """
    sizes = [_product(shape) for shape in call.shapes] if call.op not in _SIZES_DIFFER else []
    agreed = f"{call.op} {call.dtype} {sizes} {call.reduction} {call.root}"
    return int.from_bytes(hashlib.blake2b(agreed.encode(), digest_size=8).digest(), "little")


def describe(call: CollectiveCall) -> str:
    """Return a description, such as: all_reduce(float32 [10], SUM)"""
    parts = []
    if call.dtype is not None:
        shapes = [str(list(shape)) for shape in call.shapes]
        same = len(shapes) > 1 and len(set(shapes)) == 1
        listed = f"{len(shapes)} x {shapes[0]}" if same else ", ".join(shapes[:4]) + ", …" * (len(shapes) > 4)
        parts.append(f"{str(call.dtype).removeprefix('torch.')} {listed}")
    if call.reduction >= 0:
        parts.append(_REDUCTIONS[call.reduction] if call.reduction < len(_REDUCTIONS) else f"op {call.reduction}")
    if call.root >= 0:
        parts.append(f"root {call.root}")
    return f"{call.op}({', '.join(parts)})"


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= int(size)
    return product
