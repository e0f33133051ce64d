"""Shards from living ranks to those that have none, where each shard that was lost has a replica.

A rank that takes the place of another gets the shard from a rank that holds the same one, by the backend of the group.
Where the model is divided otherwise than before (another number of ranks, or `run.keep` before `run.wrap`), every shard
goes to all ranks, one tensor at a time, and each keeps what it needs of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.train.checkpoint import state
from phalanx.train.checkpoint.plain import Tensors
from phalanx.train.elastic import tensor_transfer
from phalanx.train.elastic.state_offer import Offer, ReceivedState, StateOffer, label, shapes
from phalanx.train.model import shard_placement
from phalanx.worker.process_group import objects
from phalanx.worker.rendezvous.membership import Membership
from phalanx.worker.rendezvous.store import Store


@dataclass(frozen=True)
class ShardDeal:
    """Which ranks hold which shards of the newest state that is whole, and who gives them to whom."""

    step: int
    count: int  # shards of the whole
    holders: Mapping[int, int]  # rank -> the shard that it holds
    nodes: Sequence[Sequence[int]]
    ranks: int

    @classmethod
    def of(cls, offers: Sequence[Offer], nodes: Sequence[Sequence[int]]) -> ShardDeal | None:
        """None: nobody has a shard, or one is lost. Of epochs nothing is asked: that a rank was slower through the end
        of one has to do."""
        found: dict[tuple[int, int], dict[int, int]] = {}
        prepared: dict[tuple[int, int], dict[int, int]] = {}
        for rank, (step, _, whose, _, is_prepared) in enumerate(offers):
            if whose is not None and 0 <= whose[0] < whose[1]:
                found.setdefault((step, whose[1]), {})[rank] = whose[0]
                if is_prepared:
                    prepared.setdefault((step + 1, whose[1]), {})[rank] = whose[0]
        for (step, count), committed in sorted(found.items(), reverse=True):
            holders = committed | prepared.get((step, count), {})
            if {*holders.values()} == {*range(count)}:
                return cls(step, count, holders, nodes, len(offers))
        return None

    @property
    def lacking(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks) if rank not in self.holders)

    def keeps(self, indices: Sequence[int] | None) -> bool:
        """The model is divided as before, and whoever holds a shard holds the same one again. `indices`: the shard that
        each rank is to hold now; None: not known yet."""
        if indices is None or max(indices) + 1 != self.count:
            return False
        return all(indices[rank] == shard for rank, shard in self.holders.items())

    def givers(self, indices: Sequence[int] | None) -> dict[int, int]:
        """For each rank that has nothing, one that gives it what it needs: the same shard where shards are kept, from
        the same node where there is one."""
        same = self.keeps(indices)
        given: dict[int, int] = {}  # how many ranks each one gives to
        chosen = {}
        for rank in self.lacking:
            choice = [one for one, shard in self.holders.items() if not same or (indices and shard == indices[rank])]
            node = next((node for node in self.nodes if rank in node), ())
            near = [one for one in choice if one in node] or choice
            giver = min(near, key=lambda one: (given.get(one, 0), one))
            given[giver] = given.get(giver, 0) + 1
            chosen[rank] = giver
        return chosen

    def speakers(self) -> tuple[int, ...]:
        """For each shard, the rank that gives it to all."""
        return tuple(min(rank for rank, one in self.holders.items() if one == shard) for shard in range(self.count))


class ShardHandover:
    """Of one generation, as one rank sees it."""

    def __init__(self, membership: Membership, store: Store, deal: ShardDeal) -> None:
        self._membership, self._store, self._deal = membership, store, deal

    def complete(self, kept: Mapping[str, object], past: StateOffer | None) -> ReceivedState:
        """The newest state is in the objects of this rank."""
        indices = shard_placement.indices(kept)
        same, givers = self._deal.keeps(indices), self._deal.givers(indices)
        rank = self._membership.identity.rank
        if rank in self._deal.holders and past is not None:
            past.put_back()
            held = state.taken(past.kept)
            told, own = label(held, past), held.tensors
            for taker in (one for one, giver in givers.items() if giver == rank):
                self._send(told, own, taker, same=same)
            targets = state.targets(kept, told["plain"], shapes(told))
            with torch.no_grad():
                for name, target in targets.items():
                    if same or not isinstance(own[name], DTensor):
                        _local(target).copy_(_local(own[name]))
        else:
            told, own = receive_label(self._store, rank, givers[rank], self._wire(False)), {}
            targets = state.targets(kept, told["plain"], shapes(told))
            self._receive(told, targets, givers[rank], same=same)
        if not same:
            self._spread(told, own, targets)
        state.restore(kept, told["plain"], targets)
        return ReceivedState(told["step"], told["epoch"], [])

    def _send(self, told: dict[str, Any], own: Tensors, taker: int, *, same: bool) -> None:
        send_label(self._store, told, taker, self._wire(False))
        for far in (True, False):
            tensor_transfer.send({name: _local(own[name]) for name in _names(told, far, same)}, taker, self._wire(far))

    def _receive(self, told: dict[str, Any], targets: Tensors, giver: int, *, same: bool) -> None:
        for far in (True, False):
            mine = {name: _local(targets[name]) for name in _names(told, far, same)}
            tensor_transfer.receive(mine, giver, self._wire(far))

    def _spread(self, told: dict[str, Any], own: Tensors, targets: Tensors) -> None:
        """All shards to all ranks, which take from them what they hold now."""
        speakers = self._deal.speakers()
        for name, dtype, shape, far, dim in told["tensors"]:
            if dim is None:
                continue
            wire = self._wire(far)
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=wire)
            with torch.no_grad():
                for shard, part in enumerate(divided(whole, self._deal.count, dim)):
                    body = torch.empty(part.shape, dtype=part.dtype, device=wire)
                    if speakers[shard] == self._membership.identity.rank:
                        body.copy_(_local(own[name]))
                    if body.numel():
                        dist.broadcast(body, speakers[shard])
                        part.copy_(body)
                _take(targets[name], whole)

    def _wire(self, far: bool) -> torch.device:
        return tensor_transfer.wire(self._membership, far)


def divided(whole: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Views of it, as FSDP divides: parts of the same size but for the last ones, which may be empty."""
    size = whole.shape[dim]
    each = -(-size // count)
    begins = [min(place * each, size) for place in range(count)]
    return [whole.narrow(dim, begin, min(each, size - begin)) for begin in begins]


def send_label(store: Store, told: dict[str, Any], taker: int, wire: torch.device) -> None:
    text = objects.encode(told)
    store.set(f"to {taker}", str(len(text)))
    tensor_transfer.send({"": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, taker, wire)


def receive_label(store: Store, taker: int, giver: int, wire: torch.device) -> dict[str, Any]:
    body = torch.empty(int(store.get(f"to {taker}")), dtype=torch.uint8)
    tensor_transfer.receive({"": body}, giver, wire)
    return objects.decode(bytes(body.tolist()))  # type: ignore[no-any-return]


def _names(told: Mapping[str, Any], far: bool, same: bool) -> list[str]:
    """Of tensors that go from one rank to another; shards only where both are to hold the same."""
    return [name for name, _, _, on_gpu, dim in told["tensors"] if on_gpu is far and (same or dim is None)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _take(target: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    sizes, begins = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    part = whole
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        part = part.narrow(dim, begin if size else 0, size)
    target.to_local().copy_(part)
