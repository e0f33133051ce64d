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
    """The handover of shards in one generation, for one rank. `offer`: what it has; None: nothing."""

    def __init__(self, membership: Membership, store: Store, plan: ShardHandoverPlan, offer: StateOffer | None) -> None:
        self._membership, self._store, self._plan = membership, store, plan
        self._rank = membership.placement.rank
        self._offer = offer if self._rank in plan.holders else None
        self._own: Tensors = {}
        self._label = self._exchanged_label()

    @property
    def sharded(self) -> Sequence[str]:
        """The names of the objects of which ranks have shards."""
        return self._label["sharded"]  # type: ignore[no-any-return]

    def complete(self, kept: Mapping[str, object]) -> ReceivedState:
        """Load the newest state of all ranks into these objects: all that are kept, or some of them at a time."""
        indices = shard_placement.indices(kept)
        same, givers = self._plan.keeps(indices), self._plan.givers(indices)
        targets = state.targets(kept, self._label["plain"], shapes(self._label))
        rows = [row for row in self._label["tensors"] if row[0] in targets]
        if self._offer is not None:
            self._offer.put_back()
            for taker in (one for one, giver in givers.items() if giver == self._rank):
                self._send(rows, taker, same=same)
            with torch.no_grad():
                for name, target in targets.items():
                    if same or not isinstance(self._own[name], DTensor):
                        _local(target).copy_(_local(self._own[name]))
        else:
            self._receive(rows, targets, givers[self._rank], same=same)
        if not same:
            self._spread(rows, targets)
        state.restore(kept, self._label["plain"], targets)
        return ReceivedState(self._label["step"], self._label["epoch"], [])

    def _exchanged_label(self) -> dict[str, Any]:
        givers, wire = self._plan.givers(None), self._wire(False)
        if self._offer is None:
            return receive_label(self._store, self._rank, givers[self._rank], wire)
        self._offer.put_back()
        held = state.taken(self._offer.kept)
        named, self._own = label(held, self._offer), held.tensors
        for taker in (one for one, giver in givers.items() if giver == self._rank):
            send_label(self._store, named, taker, wire)
        return named

    def _send(self, rows: Sequence[Any], taker: int, *, same: bool) -> None:
        for far in (True, False):
            mine = {name: _local(self._own[name]) for name in _names(rows, far, same)}
            tensor_transfer.send(mine, taker, self._wire(far))

    def _receive(self, rows: Sequence[Any], targets: Tensors, giver: int, *, same: bool) -> None:
        for far in (True, False):
            mine = {name: _local(targets[name]) for name in _names(rows, far, same)}
            tensor_transfer.receive(mine, giver, self._wire(far))

    def _spread(self, rows: Sequence[Any], targets: Tensors) -> None:
        """Send all shards to all ranks; each keeps the part that it now has."""
        senders = self._plan.senders()
        for name, dtype, shape, far, dim in rows:
            if dim is None:
                continue
            wire = self._wire(far)
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=wire)
            with torch.no_grad():
                for shard, part in enumerate(divided(whole, self._plan.count, dim)):
                    body = torch.empty(part.shape, dtype=part.dtype, device=wire)
                    if senders[shard] == self._rank:
                        body.copy_(_local(self._own[name]))
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


def _names(rows: Sequence[Any], far: bool, same: bool) -> list[str]:
    """Return the names of tensors that one rank sends to another; shards only if both have the same one."""
    return [name for name, _, _, on_gpu, dim in rows if on_gpu is far and (same or dim is None)]


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
