"""DDP's buckets in memory that the ranks of a machine share: their gradients are summed where they lie.

DDP makes its buckets itself, in C++, when its second forward begins and it knows in which order gradients come. What it
allocates then is replaced by a region (collectives/engines/regions.py), which it cannot tell from any other memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.collectives.engines import regions
from phalanx.collectives.engines.regions import Region


class _Allocating(TorchDispatchMode):  # type: ignore[misc]
    """Large flat tensors come to lie in regions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Callable[[], Region | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is torch.ops.aten.empty.memory_format and len(args[0]) == 1:
            dtype = options.get("dtype") or torch.get_default_dtype()
            size = int(args[0][0]) * dtype.itemsize
            if size >= regions.MIN_BYTES and options.get("device", torch.device("cpu")).type == "cpu":
                try:
                    region = Region.create(size)
                except OSError:
                    self.made.append(lambda: None)
                else:
                    self.made.append(weakref.ref(region))
                    return torch.frombuffer(region, dtype=dtype)
        return function(*args, **options)


def share(ddp: Any) -> None:
    """Its buckets, once it lays them out anew; nothing where its group has no memory in common, or they are small."""
    if ddp.find_unused_parameters and not ddp.static_graph:
        return  # it never does
    size = sum(one.numel() * one.element_size() for one in ddp.module.parameters() if one.requires_grad)
    if regions.region_engine(ddp.process_group) is None or size < regions.MIN_BYTES:
        return
    # A method of that name is pickled and copied as the class's own; it goes when it has done its work.
    ddp._pre_forward = MethodType(_pre_forward, ddp)


def _pre_forward(ddp: Any, *args: Any, **options: Any) -> Any:
    theirs = type(ddp)._pre_forward
    if torch.compiler.is_compiling():
        return theirs(ddp, *args, **options)
    allocating = _Allocating()
    with allocating:
        result = theirs(ddp, *args, **options)
    if ddp._has_rebuilt_buckets:
        del ddp._pre_forward
        engine = regions.region_engine(ddp.process_group)
        if engine is not None:
            regions.share(engine, [one() for one in allocating.made], ddp.process_group._timeout)
    return result
