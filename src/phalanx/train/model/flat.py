"""Places DDP's gradient buckets in memory that the ranks of a host share: gradients are summed in place.

DDP allocates its buckets in C++, at the start of its second forward, when it knows in which order gradients are ready.
This module replaces the memory with a region (collectives/engines/regions.py), which DDP cannot distinguish from any
other memory.
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
    """Allocates large flat tensors in regions."""

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
    """Put the buckets of a DDP into shared regions when it rebuilds them.

    Does nothing if its group shares no memory, or if they are small.
    """
    if ddp.find_unused_parameters and not ddp.static_graph:
        return  # it never rebuilds them
    size = sum(one.numel() * one.element_size() for one in ddp.module.parameters() if one.requires_grad)
    if regions.region_engine(ddp.process_group) is None or size < regions.MIN_BYTES:
        return
    # A method of that name is pickled and copied as the class's own; it is removed when the buckets are rebuilt.
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
            regions.share(engine, [one() for one in allocating.made], ddp.process_group.timeout_seconds)
    return result
