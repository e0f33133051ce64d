"""Numbers and plain objects that all ranks of a process group exchange."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from phalanx.errors import UsageError
from phalanx.worker.process_group import objects

if TYPE_CHECKING:
    import torch

    from phalanx.worker.rendezvous.membership import Membership

T = TypeVar("T")
Number = Any  # int, float, or a tensor of one element
ROUND = 64  # numbers that are sent together


class ValueExchange:
    """Reduces, broadcasts and gathers for `WorkerProcessGroup`. With one process nothing is sent."""

    def __init__(self, membership: Membership) -> None:
        self._rank = membership.placement.rank
        self._world_size = membership.placement.world_size
        self._device = membership.device
        self._backend = membership.backend

    @cached_property
    def wire(self) -> torch.device:
        """Return the device on which small values are exchanged: the CPU if the backend supports it, because that
        disturbs no stream.
        """
        import torch

        # "nccl" and "cuda:nccl" support only the GPU. Any other single name supports the CPU too.
        backend = self._backend
        gpu_only = backend and "cpu:" not in backend and ("nccl" in backend or ":" in backend)
        return self._device if gpu_only else torch.device("cpu")

    def reduce(self, x: Any, how: Literal["mean", "sum", "max"]) -> Any:
        """Reduce a number, or a dict of numbers, over all ranks."""
        if not isinstance(x, Mapping):
            return self._reduced([x], how, 0, "a number")[0]
        names = sorted(x)
        # Names are not sent, but a checksum shows whether all ranks have the same.
        values = self._reduced([x[name] for name in names], how, zlib.crc32("\0".join(names).encode()), f"{names}")
        return dict(zip(names, values, strict=True))

    def _reduced(self, values: list[Any], how: str, check: int, names: str) -> list[float]:
        import torch
        import torch.distributed as dist

        for value in values:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(
                    f"{how} takes one number per rank, not a tensor of shape {list(value.shape)}",
                    fix=f"group.{how}(x.mean()), or torch.distributed.all_reduce(x) for the tensor itself",
                )
        numbers = _stacked(values, self.wire, how)
        if not self._backend:
            return [_alike(value, number, how) for value, number in zip(values, numbers.tolist(), strict=True)]
        # Compute the largest and smallest checksum at once: the maximum of it, and of its negative.
        whole = torch.zeros(_room(len(values)), dtype=torch.float64, device=self.wire)
        whole[: len(values)] = numbers
        whole[-2:] = torch.tensor([check, -check], dtype=torch.float64)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        *found, high, low = whole.tolist()
        del found[len(values) :]
        expected = check if how == "max" else check * self._world_size
        if (high, low) != (expected, -expected):
            raise UsageError(f"{how} of a dict: the ranks have different names in it; rank {self._rank} has {names}")
        if how == "mean":
            return [number / self._world_size for number in found]
        return [_alike(value, number, how) for value, number in zip(values, found, strict=True)]

    def broadcast(self, obj: T, src: int) -> T:
        """Return the object of rank `src`."""
        if not 0 <= src < self._world_size:
            raise UsageError(f"broadcast(src={src}): there are ranks 0 to {self._world_size - 1}")
        data, refusal = _encoded(obj) if self._rank == src else (b"", None)
        if self._world_size > 1:
            import torch
            import torch.distributed as dist

            size = torch.tensor([-1 if refusal else len(data)], dtype=torch.int64, device=self.wire)
            dist.broadcast(size, src)
            _refuse({src: int(size.item())}, refusal)
            body = _to_tensor(data, int(size.item()), self.wire)
            dist.broadcast(body, src)
            if self._rank == src:
                return obj
            data = _to_bytes(body)
        elif refusal:
            raise refusal
        return objects.decode(data, self._device)  # type: ignore[no-any-return]

    def gather(self, obj: T, *, all: bool) -> list[T] | None:  # noqa: A002
        """Return the objects of all ranks on rank 0, None elsewhere; `all=True`: on every rank."""
        data, refusal = _encoded(obj)
        if self._world_size == 1:
            if refusal:
                raise refusal
            return [objects.decode(data, self._device)]
        import torch
        import torch.distributed as dist

        size = torch.tensor([-1 if refusal else len(data)], dtype=torch.int64, device=self.wire)
        sizes = [torch.empty_like(size) for _ in range(self._world_size)]
        dist.all_gather(sizes, size)
        lengths = [int(one.item()) for one in sizes]
        _refuse(dict(enumerate(lengths)), refusal)
        body = _to_tensor(data, max(lengths), self.wire)
        if all:
            bodies = [torch.empty_like(body) for _ in lengths]
            dist.all_gather(bodies, body)
        else:
            bodies = [torch.empty_like(body) for _ in lengths] if self._rank == 0 else []
            dist.gather(body, bodies or None, dst=0)
            if self._rank != 0:
                return None
        return [
            objects.decode(_to_bytes(one[:length]), self._device) for one, length in zip(bodies, lengths, strict=True)
        ]


def _encoded(obj: Any) -> tuple[bytes, UsageError | None]:
    """Encode, and return an error instead of raising it: the other ranks wait for this one."""
    try:
        return objects.encode(obj), None
    except UsageError as error:
        return b"", error


def _refuse(sizes: Mapping[int, int], mine: UsageError | None) -> None:
    """Raise on every rank if one of them has an object that cannot be sent."""
    if mine is not None:
        raise mine
    for rank, size in sizes.items():
        if size < 0:
            raise UsageError(f"rank {rank} has something that cannot be sent; its own message says why")


def _plain(value: Any, how: str) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"{how} takes a number or a dict of them, not {value!r}", fix=f"group.{how}(float(x)), group.gather(x)"
        ) from None


def _alike(value: Any, number: float, how: str) -> float:
    """Return the result as an int if this rank passed one: a sum of counts is a count. Another rank may pass a
    float.
    """
    if how == "mean" or not number.is_integer():
        return number
    whole = isinstance(value, int) or not (getattr(value, "dtype", None) is None or _is_real(value.dtype))
    return int(number) if whole else number


def _is_real(dtype: Any) -> bool:
    """Return whether a dtype of torch or numpy has fractions."""
    real = getattr(dtype, "is_floating_point", None)
    return bool(real) if real is not None else getattr(dtype, "kind", "f") not in "iub"


def _stacked(values: list[Any], wire: torch.device, how: str) -> torch.Tensor:
    """Return the values as float64 on the wire; those on an accelerator are copied together."""
    import torch

    far = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor) and value.device != wire]
    numbers = torch.tensor(
        [0.0 if place in far else _plain(value, how) for place, value in enumerate(values)], dtype=torch.float64
    ).to(wire)
    if far:
        numbers[far] = torch.stack([values[place].detach().reshape(()).double() for place in far]).to(wire)
    return numbers


def _room(count: int) -> int:
    """Return the size of the tensor for `count` numbers and the checksum.

    Dicts of slightly different lengths get the same size: torch does not survive an all_reduce of different sizes.
    """
    return -(-(count + 2) // ROUND) * ROUND


def _to_tensor(data: bytes, size: int, wire: torch.device) -> torch.Tensor:
    import torch

    padded = bytearray(size)
    padded[: len(data)] = data
    return (
        torch.frombuffer(padded, dtype=torch.uint8).to(wire) if size else torch.empty(0, dtype=torch.uint8, device=wire)
    )


def _to_bytes(body: torch.Tensor) -> bytes:
    return bytes(body.cpu().numpy().tobytes())
