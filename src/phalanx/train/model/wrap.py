"""`run.wrap(model, "ddp" | "dp" | "fsdp" | "hsdp")`: move, convert, compile and wrap a model, with good defaults."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from phalanx.errors import DeviceError, OptionError
from phalanx.train.model import buckets, compression, flat, replicas, sharding
from phalanx.train.model.buckets import Layout
from phalanx.train.model.compression import Compress
from phalanx.train.model.precision import Precision
from phalanx.train.model.precision import precision as chosen
from phalanx.train.model.sharding import Policy
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.stepping.stepper import Stepper

WAYS = ("ddp", "dp", "fsdp", "hsdp")
SHARDED = ("fsdp", "hsdp")
_FOR = {  # options that apply to some kinds of wrapping only
    "compress": ("ddp",),
    "static_graph": ("ddp",),
    "find_unused": ("ddp",),
    "shard": SHARDED,
    "shards": ("hsdp",),
}


class WrapGroup(Protocol):
    """A process group, as far as a wrapped model needs it."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def device(self) -> Any:
        """The device of this rank."""
        ...

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        ...

    def before_close(self, call: Callable[[], object], /) -> object:
        """Call `call` before the process group is destroyed."""


def wrap(
    model: Any,
    how: str = "ddp",
    *,
    group: WrapGroup,
    stepper: Stepper | None = None,
    accumulate: int = 1,
    precision: str | None = None,
    compile: bool = False,  # noqa: A002
    compress: Compress = None,
    static_graph: bool = False,
    find_unused: bool = False,
    sync_batchnorm: bool = False,
    shard: Policy = None,
    shards: int | None = None,
    equal: Layout | None = None,
    unequal: Collection[str] = (),
    elastic: bool = False,
) -> Wrapped:
    """Return the module to call instead of `model`, which is moved to the group's device and changed in place.

    how             "ddp", "fsdp", "hsdp" or "dp": see `Run.wrap`
    accumulate      micro-batches per step; gradients are averaged once per step. Default: 1
    precision       "bf16", or "fp16" with a scaled loss: run.backward(loss). Default: that of the model
    compile         compile the model with torch.compile
    compress        compress gradients of DDP: "fp16", "bf16", "powersgd" or PowerSGD(rank=2, start=1000)
    static_graph    every step uses the same parameters, so that DDP can plan ahead
    find_unused     not every step uses all parameters: DDP finds out which
    sync_batchnorm  batch statistics over all ranks, not per rank
    shard           which parts FSDP gathers together: a class, or a function of a module. Default: the model's children
    shards          "hsdp": ranks per replica. Default: the ranks of a node; with one node, half of them
    equal           the model is already the same on all ranks; the bucket layout of an earlier DDP of it
    unequal         names of buffers that some ranks do not have: DDP does not send them
    elastic         the group was formed again: if `shards` does not divide the ranks, another number is used
    """
    device, size = group.device, group.world_size
    given = {
        "compress": compress is not None,
        "static_graph": static_graph,
        "find_unused": find_unused,
        "shard": shard is not None,
        "shards": shards is not None,
    }
    _check(model, how, size, given)
    compression.check(compress)
    rows = replicas.rows(_nodes(group), shards, elastic=elastic) if how == "hsdp" else None
    mixed = chosen(precision, device)
    if sync_batchnorm and size > 1:
        if device.type == "cpu":
            raise DeviceError(
                "sync_batchnorm=True on CPU: torch has SyncBatchNorm for GPUs only",
                fix="leave sync_batchnorm out, or use GroupNorm, which needs no other rank",
            )
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(device)
    engine: Any = model
    became: list[tuple[Any, Any]] = []
    sharded = how in SHARDED and dist.is_initialized()
    if sharded:
        became = sharding.shard(
            model, device, policy=shard, precision=mixed, compiled=compile, rows=rows, equal=equal is not None
        )
    elif compile:
        model.compile()
    if how == "dp" and device.type == "cuda" and torch.cuda.device_count() > 1:
        engine = _data_parallel(model, device, mixed, compiled=compile)
    elif how == "ddp" and size > 1 and any(parameter.requires_grad for parameter in model.parameters()):
        engine = _ddp(model, device, equal, unequal, static_graph=static_graph, find_unused_parameters=find_unused)
        compression.register(engine, compress)
    wrapped = Wrapped(
        model,
        engine,
        how,
        peers=group,
        device=device,
        world_size=size,
        precision=mixed,
        stepper=stepper or Stepper(),
        accumulate=accumulate,
        sharded=sharded,
        became=became,
    )
    if static_graph:
        wrapped.synchronise(True)  # DDP learns the graph in its first backward, if that one synchronises
    if engine is not model:
        held = weakref.ref(wrapped)
        group.before_close(lambda: _close(held()))
    return wrapped


def _ddp(model: Any, device: Any, equal: Layout | None, unequal: Collection[str], **options: Any) -> Any:
    own = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else None
    with buckets.laid_out(equal or []), _left_out(model, unequal):
        ddp = nn.parallel.DistributedDataParallel(
            model, device_ids=own, gradient_as_bucket_view=True, init_sync=equal is None, **options
        )
    ddp.given_layout = equal or []
    flat.share(ddp)
    # Buffers that are not part of the state are constants (masks, tables). They are the same everywhere after the first
    # broadcast, and need none before every forward.
    kept = set(model.state_dict())
    ddp.broadcast_buffers = any(name in kept for name, _ in model.named_buffers())
    if equal is not None:
        done = {*kept, *unequal}
        others = [one.detach() for name, one in (*model.named_parameters(), *model.named_buffers()) if name not in done]
        if others:
            dist._broadcast_coalesced(ddp.process_group, others, 1 << 26, 0)
    return ddp


@contextlib.contextmanager
def _left_out(model: Any, names: Collection[str]) -> Iterator[None]:
    """Make a DDP that is created in this context leave out these buffers."""
    attribute = "_ddp_params_and_buffers_to_ignore"
    before = getattr(model, attribute, [])
    if not names:
        yield
        return
    setattr(model, attribute, [*before, *names])
    try:
        yield
    finally:
        setattr(model, attribute, before)


class _Cast(nn.Module):  # type: ignore[misc]
    """Sets autocast in each of DataParallel's threads, which inherit that it is on, but not its type."""

    def __init__(self, module: Any, precision: Precision) -> None:
        super().__init__()
        self.module, self.precision = module, precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision.autocast():
            return self.module(*args, **kwargs)


def _data_parallel(model: Any, device: Any, precision: Precision, *, compiled: bool) -> Any:
    if compiled:
        raise OptionError(
            'compile=True with "dp": the copies of the model would all run the first one\'s code',
            fix='run.wrap(model, "ddp", compile=True), with one process a GPU',
        )
    first = device.index or 0
    others = [index for index in range(torch.cuda.device_count()) if index != first]
    inner = model if precision.name is None else _Cast(model, precision)
    return nn.DataParallel(inner, device_ids=[first, *others])


def _close(wrapped: Wrapped | None) -> None:
    if wrapped is not None:
        wrapped.close()


def _nodes(group: WrapGroup) -> Sequence[Sequence[int]]:
    topology = getattr(group, "topology", None)
    return topology.nodes if topology is not None else [range(group.world_size)]


def _check(model: Any, how: str, size: int, given: Mapping[str, bool]) -> None:
    if not isinstance(how, str):
        what = f"wrap() was given a {type(how).__name__} after the model, expected one of {', '.join(WAYS)}"
        raise OptionError(what, fix="run.wrap(model); optimizers and loaders are not wrapped")
    if how not in WAYS:
        raise OptionError(f'run.wrap(model, "{how}"): known are {", ".join(WAYS)}', fix="run.wrap(model)")
    if isinstance(model, Wrapped | nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise OptionError(f"the model is wrapped already: {type(model).__name__}", fix="run.wrap(model.module)")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise OptionError(
            "the model is on the meta device: its parameters have no values",
            fix='model.to_empty(device="cpu"), then load or initialise them, then run.wrap(model)',
        )
    if how == "dp" and size > 1:
        raise OptionError(
            f'"dp" is one process with several devices, and these are {size} processes',
            fix='run.wrap(model, "ddp"), or start one process: phalanx run -g 1',
        )
    for name, ways in _FOR.items():
        if given[name] and how not in ways:
            text = " and ".join(f'"{way}"' for way in ways)
            raise OptionError(f'{name} is for {text}, not for "{how}"', fix=f'run.wrap(model, "{ways[0]}", …)')
    if given["static_graph"] and given["find_unused"]:
        raise OptionError(
            "static_graph says that every step uses the same parameters, find_unused that it does not",
            fix="leave one of them out; a static graph finds unused parameters by itself",
        )
