"""The handover of shards from live ranks to new ones, if each lost shard has a replica.

A new rank gets its shard from a rank that has the same one, through the backend of the group. If the model is sharded
differently than before (another number of ranks, or `run.keep` before `run.wrap`), every shard is sent to all ranks,
one tensor at a time, and each keeps its part.
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
from phalanx.train.checkpoint.format.plain import Tensors
from phalanx.train.elastic import tensor_transfer
from phalanx.train.elastic.state_offer import Offer, ReceivedState, StateOffer, label, shapes
from phalanx.train.model import shard_placement
from phalanx.worker.process_group import objects
from phalanx.worker.rendezvous.membership import Membership
from phalanx.worker.rendezvous.store import Store


@dataclass(frozen=True)
class ShardHandoverPlan:
    """Which ranks have which shards of the newest complete state, and which rank sends them to which."""

    step: int
    count: int  # shards of the whole
    holders: Mapping[int, int]  # rank -> its shard
    nodes: Sequence[Sequence[int]]
    ranks: int

    @classmethod
    def of(cls, offers: Sequence[Offer], nodes: Sequence[Sequence[int]]) -> ShardHandoverPlan | None:
        """Decide from the offers of all ranks. None: no rank has a shard, or one is lost.

        Epochs are not compared: at the end of an epoch a slower rank may still be in the previous one.
        """
        found: dict[tuple[int, int], dict[int, int]] = {}
        prepared: dict[tuple[int, int], dict[int, int]] = {}
        for rank, (step, _, shard, _, is_prepared) in enumerate(offers):
            if shard is not None and 0 <= shard[0] < shard[1]:
                found.setdefault((step, shard[1]), {})[rank] = shard[0]
                if is_prepared:
                    prepared.setdefault((step + 1, shard[1]), {})[rank] = shard[0]
        for (step, count), committed in sorted(found.items(), reverse=True):
            holders = committed | prepared.get((step, count), {})
            if {*holders.values()} == {*range(count)}:
                return cls(step, count, holders, nodes, len(offers))
        return None

    @property
    def lacking(self) -> tuple[int, ...]:
        """The ranks without a shard."""
        return tuple(rank for rank in range(self.ranks) if rank not in self.holders)

    def keeps(self, indices: Sequence[int] | None) -> bool:
        """Return whether the model is sharded as before, and every holder keeps its shard.

        `indices`: the shard of each rank from now on; None: unknown.
        """
        if indices is None or max(indices) + 1 != self.count:
            return False
        return all(indices[rank] == shard for rank, shard in self.holders.items())

    def givers(self, indices: Sequence[int] | None) -> dict[int, int]:
        """Return the sender for each rank without a shard.

        It has the same shard if shards are kept, and is on the same node if possible.
        """
        same = self.keeps(indices)
        given: dict[int, int] = {}  # number of ranks that each one sends to
        chosen = {}
        for rank in self.lacking:
            choice = [one for one, shard in self.holders.items() if not same or (indices and shard == indices[rank])]
            node = next((node for node in self.nodes if rank in node), ())
            near = [one for one in choice if one in node] or choice
            giver = min(near, key=lambda one: (given.get(one, 0), one))
            given[giver] = given.get(giver, 0) + 1
            chosen[rank] = giver
        return chosen

    def senders(self) -> tuple[int, ...]:
        """Return, for each shard, the rank that sends it to all."""
        return tuple(min(rank for rank, one in self.holders.items() if one == shard) for shard in range(self.count))


class ShardHandover:
    """The handover of shards in one generation, for one rank."""

    def __init__(self, membership: Membership, store: Store, plan: ShardHandoverPlan) -> None:
        self._membership, self._store, self._plan = membership, store, plan

    def complete(self, kept: Mapping[str, object], offer: StateOffer | None) -> ReceivedState:
        """Load the newest state of all ranks into the kept objects."""
        indices = shard_placement.indices(kept)
        same, givers = self._plan.keeps(indices), self._plan.givers(indices)
        rank = self._membership.placement.rank
        if rank in self._plan.holders and offer is not None:
            offer.put_back()
            held = state.taken(offer.kept)
            named, own = label(held, offer), held.tensors
            for taker in (one for one, giver in givers.items() if giver == rank):
                self._send(named, own, taker, same=same)
            targets = state.targets(kept, named["plain"], shapes(named))
            with torch.no_grad():
                for name, target in targets.items():
                    if same or not isinstance(own[name], DTensor):
                        _local(target).copy_(_local(own[name]))
        else:
            named, own = receive_label(self._store, rank, givers[rank], self._wire(False)), {}
            targets = state.targets(kept, named["plain"], shapes(named))
            self._receive(named, targets, givers[rank], same=same)
        if not same:
            self._spread(named, own, targets)
        state.restore(kept, named["plain"], targets)
        return ReceivedState(named["step"], named["epoch"], [])

    def _send(self, named: dict[str, Any], own: Tensors, taker: int, *, same: bool) -> None:
        send_label(self._store, named, taker, self._wire(False))
        for far in (True, False):
            tensor_transfer.send({name: _local(own[name]) for name in _names(named, far, same)}, taker, self._wire(far))

    def _receive(self, named: dict[str, Any], targets: Tensors, giver: int, *, same: bool) -> None:
        for far in (True, False):
            mine = {name: _local(targets[name]) for name in _names(named, far, same)}
            tensor_transfer.receive(mine, giver, self._wire(far))

    def _spread(self, named: dict[str, Any], own: Tensors, targets: Tensors) -> None:
        """Send all shards to all ranks; each keeps the part that it now has."""
        senders = self._plan.senders()
        for name, dtype, shape, far, dim in named["tensors"]:
            if dim is None:
                continue
            wire = self._wire(far)
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=wire)
            with torch.no_grad():
                for shard, part in enumerate(divided(whole, self._plan.count, dim)):
                    body = torch.empty(part.shape, dtype=part.dtype, device=wire)
                    if senders[shard] == self._membership.placement.rank:
                        body.copy_(_local(own[name]))
                    if body.numel():
                        dist.broadcast(body, senders[shard])
                        part.copy_(body)
                _take(targets[name], whole)

    def _wire(self, far: bool) -> torch.device:
        return tensor_transfer.wire(self._membership, far)


def divided(whole: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Return views of the tensor, sharded like FSDP: equal parts, except that the last ones may be smaller or empty."""
    size = whole.shape[dim]
    each = -(-size // count)
    begins = [min(place * each, size) for place in range(count)]
    return [whole.narrow(dim, begin, min(each, size - begin)) for begin in begins]


def send_label(store: Store, named: dict[str, Any], taker: int, wire: torch.device) -> None:
    """Send the label of a state to a rank."""
    text = objects.encode(named)
    store.set(f"to {taker}", str(len(text)))
    tensor_transfer.send({"": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, taker, wire)


def receive_label(store: Store, taker: int, giver: int, wire: torch.device) -> dict[str, Any]:
    """Receive the label of a state from a rank."""
    body = torch.empty(int(store.get(f"to {taker}")), dtype=torch.uint8)
    tensor_transfer.receive({"": body}, giver, wire)
    return objects.decode(bytes(body.tolist()))  # type: ignore[no-any-return]


def _names(named: Mapping[str, Any], far: bool, same: bool) -> list[str]:
    """Return the names of tensors that one rank sends to another; shards only if both have the same one."""
    return [name for name, _, _, on_gpu, dim in named["tensors"] if on_gpu is far and (same or dim is None)]


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
