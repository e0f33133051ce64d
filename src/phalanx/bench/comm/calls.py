"""One operation of one backend on tensors that are there already: a call without arguments, to be made many times."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx.bench.comm import patterns, traffic
from phalanx.bench.comm.cells import device_of
from phalanx.bench.comm.patterns import Tile
from phalanx.collectives import registration
from phalanx.collectives.engines import regions

Call = Callable[[], object]
ROOT = 0
REGIONS = "regions"

# Newer names, where they are: the older ones warn at every call then, and that takes time.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Task:
    """One operation, whoever does it."""

    operation: str
    dtype: str
    place: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.operation} in place" if self.place == "in" and self.operation in _BOTH else self.operation


_BOTH = [name for name, operation in traffic.OPERATIONS.items() if operation.place == "both"]


@dataclass(frozen=True)
class Buffers:
    """The same for all backends of a device. `whole` goes in, or is where it happens; `other` and `part` come out."""

    whole: torch.Tensor
    other: torch.Tensor
    part: torch.Tensor
    rank: int
    ranks: int

    @classmethod
    def make(cls, size: int, dtype: str, device: torch.device, rank: int, ranks: int) -> Buffers:
        count = max(1, size // traffic.DTYPES[dtype])
        count = -(-count // ranks) * ranks  # room for parts of the smallest sizes
        kind = getattr(torch, dtype)
        whole, other = (torch.ones(count, dtype=kind, device=device) for _ in range(2))
        return cls(whole, other, torch.ones(count // ranks, dtype=kind, device=device), rank, ranks)

    def cut(self, operation: str, size: int, dtype: str) -> Buffers:
        count = traffic.elements(operation, size, self.ranks, dtype) if operation != traffic.COPY else len(self.whole)
        parts = (self.whole[:count], self.other[:count], self.part[: count // self.ranks])
        return Buffers(*parts, self.rank, self.ranks)

    @property
    def bytes(self) -> int:
        return int(self.whole.numel() * self.whole.element_size())

    @property
    def wholes(self) -> list[torch.Tensor]:
        return list(self.whole.chunk(self.ranks))

    @property
    def others(self) -> list[torch.Tensor]:
        return list(self.other.chunk(self.ranks))


class Party(Protocol):
    """A backend, as this rank is in it."""

    name: str
    device: torch.device

    def place(self, task: Task, buffers: Buffers) -> Buffers:
        """The tensors, where this backend wants them; every rank must call it."""

    def call(self, task: Task, buffers: Buffers) -> Call | None:
        """None: there is no such operation."""

    def meet(self) -> None:
        """Until all ranks are here, and this device has nothing left to do."""

    def settle(self) -> None:
        """Until this device has nothing left to do."""

    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    def recv(self, tensor: torch.Tensor, source: int) -> None: ...


class Group:
    """A process group of torch."""

    def __init__(self, name: str, device: torch.device, limit: float) -> None:
        self.name = name
        self.device = device
        self.group = dist.new_group(backend=name, timeout=timedelta(seconds=limit))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def meet(self) -> None:
        dist.barrier(group=self.group)
        self.settle()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        dist.send(tensor, to, group=self.group)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        dist.recv(tensor, source, group=self.group)

    def place(self, task: Task, buffers: Buffers) -> Buffers:  # noqa: ARG002
        return buffers

    def call(self, task: Task, b: Buffers) -> Call | None:
        g, root = self.group, b.rank == ROOT
        last = b.ranks - 1
        inside = task.place == "in"
        match task.operation:
            case "all_reduce":
                return lambda: dist.all_reduce(b.whole, group=g)
            case "broadcast":
                return lambda: dist.broadcast(b.whole, ROOT, group=g)
            case "reduce":
                return lambda: dist.reduce(b.whole, ROOT, group=g)
            case "all_gather":
                outs = b.wholes
                return lambda: dist.all_gather(outs, b.part, group=g)
            case "all_gather_into_tensor":
                source = b.wholes[b.rank] if inside else b.part
                return lambda: _all_gather_single(b.whole, source, group=g)
            case "reduce_scatter":
                ins = b.wholes
                return lambda: dist.reduce_scatter(b.part, ins, group=g)
            case "reduce_scatter_tensor":
                target = b.wholes[b.rank] if inside else b.part
                return lambda: _reduce_scatter_single(target, b.whole, group=g)
            case "all_to_all":
                ins, outs = b.wholes, b.others
                return lambda: dist.all_to_all(outs, ins, group=g)
            case "all_to_all_single":
                return lambda: dist.all_to_all_single(b.other, b.whole, group=g)
            case "gather":
                gathered = b.wholes if root else None
                return lambda: dist.gather(b.part, gathered, ROOT, group=g)
            case "scatter":
                scattered = b.wholes if root else None
                return lambda: dist.scatter(b.part, scattered, ROOT, group=g)
            case "barrier":
                return lambda: dist.barrier(group=g)
            case "sendrecv" if last:
                return self._ring(b)
            case "pingpong" if last:
                return _pingpong(self, b)
        return None

    def _ring(self, b: Buffers) -> Call:
        after, before = (b.rank + 1) % b.ranks, (b.rank - 1) % b.ranks
        both = [dist.P2POp(dist.isend, b.whole, after, self.group), dist.P2POp(dist.irecv, b.other, before, self.group)]

        def ring() -> None:
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return ring


class Regions(Group):
    """shm, with tensors in memory that all ranks have mapped: so run.wrap lays out the buckets of DDP."""

    def __init__(self, limit: float) -> None:
        super().__init__("shm", torch.device("cpu"), limit)
        self.name = REGIONS
        self._limit = limit
        engine = regions.region_engine(self.group)
        if engine is None:
            raise ValueError("the ranks share no memory")
        self._engine = engine

    def place(self, task: Task, buffers: Buffers) -> Buffers:
        if task.operation != "all_reduce":
            return buffers
        region = regions.Region.create(buffers.bytes)
        regions.share(self._engine, [region], self._limit)
        return replace(buffers, whole=torch.frombuffer(region, dtype=buffers.whole.dtype))

    def call(self, task: Task, b: Buffers) -> Call | None:
        return super().call(task, b) if task.operation == "all_reduce" else None


class Copying:
    """What memory can do: every rank copies, all at once."""

    def __init__(self, device: torch.device) -> None:
        self.name = device.type
        self.device = device

    def meet(self) -> None:
        dist.barrier()
        self.settle()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        raise NotImplementedError

    def place(self, task: Task, buffers: Buffers) -> Buffers:  # noqa: ARG002
        return buffers

    def call(self, task: Task, b: Buffers) -> Call | None:
        if task.operation != traffic.COPY:
            return None
        if self.device.type == "cuda":
            return lambda: b.other.copy_(b.whole)
        target, source, size, move = b.other.data_ptr(), b.whole.data_ptr(), b.bytes, ctypes.memmove
        return lambda: move(target, source, size)


def _pingpong(party: Group, b: Buffers) -> Call:
    last = b.ranks - 1
    if b.rank == 0:

        def ping() -> None:
            party.send(b.whole, last)
            party.recv(b.other, last)

        return ping
    if b.rank == last:

        def pong() -> None:
            party.recv(b.other, 0)
            party.send(b.whole, 0)

        return pong
    return lambda: None


def parties(names: tuple[str, ...], device: torch.device, limit: float) -> tuple[list[Party], dict[str, str]]:
    """Those that can be, and why the others cannot. Every rank must call it, and has the same answer."""
    found: list[Party] = []
    refused: dict[str, str] = {}
    for name in names:
        made: Party | None = None
        why = ""
        try:
            made = _party(name, device, limit)
        except Exception as error:
            why = first_line(error)
        fine = torch.tensor([made is not None], dtype=torch.int32)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if made is not None and fine.item():
            found.append(made)
        else:
            refused[name] = why or "another rank cannot"
    return found, refused


def _party(name: str, device: torch.device, limit: float) -> Party:
    if name == "mpi4py":
        from phalanx.bench.comm.direct import Direct

        return Direct()
    registration.register()
    if name == REGIONS:
        return Regions(limit)
    where = device if device_of(name) == "cuda" else torch.device("cpu")
    if where.type != device_of(name):
        raise ValueError(f"{name} works between GPUs, and there is none")
    return Group(name, where, limit)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# -- what goes in, and what has to come out


def fill(task: Task, b: Buffers) -> None:
    """Whatever a rank gives; where something comes out that it has not given, nothing that could pass for it."""
    if task.operation in ("barrier", traffic.COPY):
        return
    own = patterns.tile(b.rank, 0, b.ranks)
    blank = (-1,) if b.whole.dtype.is_signed else (99,)
    for tensor in (b.whole, b.other, b.part):
        patterns.fill(tensor, blank)
    match task.operation:
        case "all_gather" | "gather":
            patterns.fill(b.part, own)
        case "all_gather_into_tensor":
            patterns.fill(b.wholes[b.rank] if task.place == "in" else b.part, own)
        case "broadcast" | "scatter" if b.rank != ROOT:
            pass
        case _:
            patterns.fill(b.whole, own)


def wrong(task: Task, b: Buffers) -> int:
    """Elements that are not what they should be, in this rank."""
    return sum(patterns.wrong(tensor, tile) for tensor, tile in _expected(task, b))


def _expected(task: Task, b: Buffers) -> list[tuple[torch.Tensor, Tile]]:
    each = len(b.part)
    root = b.rank == ROOT
    match task.operation:
        case "all_reduce":
            return [(b.whole, patterns.total(0, b.ranks))]
        case "reduce" if root:
            return [(b.whole, patterns.total(0, b.ranks))]
        case "broadcast":
            return [(b.whole, patterns.tile(ROOT, 0, b.ranks))]
        case "all_gather" | "all_gather_into_tensor":
            return [(part, patterns.tile(rank, 0, b.ranks)) for rank, part in enumerate(b.wholes)]
        case "gather" if root:
            return [(part, patterns.tile(rank, 0, b.ranks)) for rank, part in enumerate(b.wholes)]
        case "reduce_scatter" | "reduce_scatter_tensor":
            where = b.wholes[b.rank] if task.place == "in" else b.part
            return [(where, patterns.total(b.rank * each, b.ranks))]
        case "all_to_all" | "all_to_all_single":
            return [(part, patterns.tile(rank, b.rank * each, b.ranks)) for rank, part in enumerate(b.others)]
        case "scatter":
            return [(b.part, patterns.tile(ROOT, b.rank * each, b.ranks))]
        case "sendrecv":
            return [(b.other, patterns.tile((b.rank - 1) % b.ranks, 0, b.ranks))]
        case "pingpong" if b.rank in (0, b.ranks - 1):
            return [(b.other, patterns.tile(b.ranks - 1 - b.rank, 0, b.ranks))]
    return []


def tasks(operations: tuple[str, ...], dtype: str, size: int, *, in_place: bool) -> list[Task]:
    found = []
    for name in operations:
        operation = traffic.OPERATIONS[name]
        if not operation.sized:
            continue
        places = {"in": ["in"], "out": ["out"], "both": ["out", "in"] if in_place else ["out"]}[operation.place]
        found += [Task(name, dtype, place, size) for place in places]
    return found


def as_group(party: Party) -> Any:
    return getattr(party, "group", None)
