"""Sends tensors from one rank to another through the backend: in a few large pieces, not one message per tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from phalanx.worker.rendezvous.membership import Membership

SMALL = 1 << 20  # bytes: smaller tensors are sent together
LARGE = 1 << 29  # larger tensors are sent in several pieces


CPU = torch.device("cpu")


def wire(membership: Membership, far: bool) -> torch.device:
    """Return the device from which tensors are sent. `far`: the sender has them on a GPU."""
    backend = membership.backend
    return membership.device if "nccl" in backend and (far or "gloo" not in backend) else CPU


def send(tensors: Mapping[str, torch.Tensor], to: int, wire: torch.device = CPU) -> None:
    """Send tensors to a rank. `wire`: the device that they are sent from and received on."""
    with torch.no_grad():
        for names in together({name: _size(tensor) for name, tensor in tensors.items()}):
            parts = [_bytes(tensors[name].detach(), wire) for name in names]
            for piece in (parts[0] if len(parts) == 1 else torch.cat(parts)).split(LARGE):
                dist.send(piece, to)


def receive(targets: Mapping[str, torch.Tensor], source: int, wire: torch.device = CPU) -> None:
    """Receive tensors from a rank, into `targets`."""
    with torch.no_grad():
        for names in together({name: _size(target) for name, target in targets.items()}):
            first = targets[names[0]].detach()
            if len(names) == 1 and first.is_contiguous() and wire == first.device:
                whole = first.view(-1).view(torch.uint8)
            else:
                size = sum(_size(targets[name]) for name in names)
                whole = torch.empty(size, dtype=torch.uint8, device=wire)
            for piece in whole.split(LARGE):
                dist.recv(piece, source)
            if whole.data_ptr() != first.data_ptr():
                for name, part in zip(names, whole.split([_size(targets[name]) for name in names]), strict=True):
                    target = targets[name].detach()
                    # A part may begin at an address that is not aligned for its type.
                    target.copy_(part.clone().view(target.dtype).view(target.shape))


def together(sizes: Mapping[str, int]) -> Iterator[Sequence[str]]:
    """Yield names of tensors that are sent as one, in an order that both ranks share. Empty tensors are not sent."""
    heap: list[str] = []
    weight = 0
    for name, size in sizes.items():
        if size >= SMALL:
            yield [name]
        elif size:
            heap.append(name)
            weight += size
            if weight >= SMALL:
                yield heap
                heap, weight = [], 0
    if heap:
        yield heap


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)


def _bytes(tensor: torch.Tensor, wire: torch.device) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).to(wire)
