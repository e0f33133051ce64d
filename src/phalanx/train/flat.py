"""DDP's buckets in memory that the ranks of a machine share: their gradients are summed where they lie.

DDP makes its buckets itself, in C++, when its second forward begins and it knows in which order gradients come. What it
allocates then is replaced by a region (phalanx.collectives.regions), which it cannot tell from any other memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.collectives import regions
from phalanx.collectives.regions import Region


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
            if size >= regions.LEAST and options.get("device", torch.device("cpu")).type == "cpu":
                try:
                    region = Region.made(size)
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
    engine = regions.lender(ddp.process_group)
    if engine is None or size < regions.LEAST:
        return
    theirs, timeout = type(ddp)._pre_forward, ddp.process_group._timeout

    def before_forward(ddp: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return theirs(ddp, *args, **options)
        allocating = _Allocating()
        with allocating:
            result = theirs(ddp, *args, **options)
        if ddp._has_rebuilt_buckets:
            del ddp._pre_forward
            regions.show(engine, [one() for one in allocating.made], timeout)
        return result

    held = weakref.proxy(ddp)  # it is not to hold itself
    ddp._pre_forward = lambda *args, **options: before_forward(held, *args, **options)
