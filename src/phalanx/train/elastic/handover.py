"""The handover: state is sent from live ranks to new ones, as raw tensors from memory to memory.

After a failure every survivor has the state of its last committed step; usually that is the same for all. Training
resumes from the newest. Ranks exchange who has what when they meet (`StateOffer.encoded`), so there is nothing to agree
on later. The holders immediately copy the state to shared memory for new ranks on their node, while those are still
creating their objects, and continue without waiting for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.cluster.sharing import HOST
from phalanx.cluster.sources.surroundings import environment
from phalanx.train.checkpoint import state
from phalanx.train.checkpoint.state import Shape
from phalanx.train.elastic import tensor_transfer
from phalanx.train.elastic.memfd_tensors import MemfdTensors, OpenedMemfd, PackingThread
from phalanx.train.elastic.shard_handover import ShardHandover, ShardHandoverPlan, receive_label, send_label
from phalanx.train.elastic.state_offer import ReceivedState, StateOffer, label, offers, shapes
from phalanx.worker.rendezvous.membership import Membership
from phalanx.worker.rendezvous.store import Store


@dataclass(frozen=True)
class HandoverPlan:
    """Which ranks have the newest state, and which need it."""

    holders: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()
    nodes: Sequence[Sequence[int]] = ()
    alike: bool = False  # the buckets of their DDP are the same

    @classmethod
    def of(cls, encoded: Sequence[str], nodes: Sequence[Sequence[int]]) -> HandoverPlan:
        """Decide from the offers of all ranks. There are no holders if no rank has a state, or if they have shards."""
        found = offers(encoded)
        places = [(step, epoch) for step, epoch, *_ in found]
        newest = max(places)
        holders = tuple(rank for rank, place in enumerate(places) if place == newest)
        lacking = tuple(rank for rank, place in enumerate(places) if place != newest)
        if newest[0] < 0 or any(shard for _, _, shard, *_ in found):
            return cls()
        return cls(holders, lacking, nodes, len({found[rank][3] for rank in holders}) == 1)

    def near(self, rank: int) -> tuple[int, ...]:
        """Return the holders on the node of a rank."""
        node = next((node for node in self.nodes if rank in node), ())
        return tuple(holder for holder in self.holders if holder in node)

    def giver(self, rank: int) -> int:
        """Return the holder that sends the state to a rank through the backend, on the same node if possible."""
        choice = self.near(rank) or self.holders
        return choice[self.lacking.index(rank) % len(choice)]


class Handover:
    """The handover of one generation, for one rank."""

    def __init__(self, membership: Membership, offer: StateOffer | None) -> None:
        self._rank = membership.placement.rank
        self._membership = membership
        # With HOST set, NCCL treats the ranks of a node as several hosts, and is much slower than shared memory.
        self._by_memory = HOST in environment() and membership.device.type == "cuda"
        encoded, nodes = [participant.offer for participant in membership.participants], membership.topology.nodes
        self._plan, self._shards = HandoverPlan.of(encoded, nodes), ShardHandoverPlan.of(offers(encoded), nodes)
        self.offer = self._settled(offer)  # until the handover is complete
        self._store = Store(membership.store.at("handover"), membership.timeout)
        self._packing: PackingThread | None = None
        self._by_shard: ShardHandover | None = None
        self.spoilt = False  # the objects of the offer are being overwritten

    def _settled(self, offer: StateOffer | None) -> StateOffer | None:
        """Return what this rank has once a prepared step is committed or dropped, according to the offers of all
        ranks.
        """
        if offer is None or offer.pending is None:
            return offer
        if self._shards is not None and self._shards.step == offer.step + 1:
            return offer.roll_forward()
        return offer.discard()

    @property
    def awaited(self) -> bool:
        """Whether some rank has the state that training resumes from."""
        return bool(self._plan.holders) or self._shards is not None

    @property
    def holder(self) -> int | None:
        """The first rank that has a state of the training, if any."""
        found = offers([participant.offer for participant in self._membership.participants])
        return next((rank for rank, (step, *_) in enumerate(found) if step >= 0), None)

    def prepare(self) -> None:
        """Copy this rank's part for new ranks of its node to shared memory, in a thread, while the group forms."""
        plan, rank, offer = self._plan, self._rank, self.offer
        if offer is None or rank not in plan.holders or not self._takers():
            return
        offer.put_back()
        held = state.taken(offer.kept)
        near = {name: tensor for name, tensor in held.tensors.items() if self._by_memory or not tensor.is_cuda}
        givers = plan.near(rank)
        mine = _share(near, givers.index(rank), len(givers))
        named = label(held, offer) if rank == givers[0] else {}
        self._packing = PackingThread(lambda: self._pack(mine, named))

    def _pack(self, tensors: Mapping[str, torch.Tensor], named: dict[str, object]) -> MemfdTensors:
        packed = MemfdTensors(tensors, named)
        self._store.set(f"from {self._rank}", packed.address)
        return packed

    def sharded(self) -> Sequence[str]:
        """Return the names of the objects of which ranks have shards, if these are handed over. All ranks call it."""
        return self._of_shards(self._shards).sharded if self._shards is not None else ()

    def _of_shards(self, plan: ShardHandoverPlan) -> ShardHandover:
        if self._by_shard is None:
            self._by_shard = ShardHandover(self._membership, self._store, plan, self.offer)
        return self._by_shard

    def complete(self, kept: Mapping[str, object], *, more: bool = False) -> ReceivedState | None:
        """Load the newest state of all ranks into the kept objects. None: no rank has one.

        `more`: these are not all objects, and it is called again for the sharded ones.
        """
        if self._shards is not None:
            by_shard = self._of_shards(self._shards)
            if not more:
                self.offer = self._by_shard = None
            return by_shard.complete(kept)
        plan, rank, offer = self._plan, self._rank, self.offer
        self.offer = None
        if not plan.holders:
            return None
        if rank in plan.holders and offer is not None:
            if self._packing is not None:
                self._packing.result()  # from here on the script may change these tensors
            offer.put_back()
            self._send(offer)
            _move_state(kept, offer)
            return ReceivedState(offer.step, offer.epoch, offer.layouts if plan.alike else [])
        self.spoilt = offer is not None and any(thing is offer.kept.get(name) for name, thing in kept.items())
        return self._receive(kept)

    def conclude(self) -> None:
        """Free the shared memory after the first step, in which all ranks took part."""
        if self._packing is not None:
            self._store.wait(*(f"taken {rank}" for rank in self._takers()))
            self.close()

    def close(self) -> None:
        """Free the shared memory."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.close()

    def _takers(self) -> list[int]:
        return [rank for rank in self._plan.lacking if self._rank in self._plan.near(rank)]

    def _send(self, offer: StateOffer) -> None:
        takers = [rank for rank in self._plan.lacking if self._plan.giver(rank) == self._rank]
        if not takers:
            return
        held = state.taken(offer.kept)
        for taker in takers:
            near = bool(self._plan.near(taker))
            if not near:
                send_label(self._store, label(held, offer), taker, self._wire(False))
            for far in self._by_backend(near):
                theirs = {name: one for name, one in held.tensors.items() if one.is_cuda is far}
                tensor_transfer.send(theirs, taker, self._wire(far))

    def _receive(self, kept: Mapping[str, object]) -> ReceivedState:
        plan, rank = self._plan, self._rank
        near = plan.near(rank)
        if not near:
            received = receive_label(self._store, rank, plan.giver(rank), self._wire(False))
            targets = state.targets(kept, received["plain"], self._shapes(received))
        else:
            with contextlib.ExitStack() as stack:
                opened = [stack.enter_context(OpenedMemfd(self._store.get(f"from {one}").decode())) for one in near]
                received = opened[0].label
                there = self._shapes(received)
                if len([one for one in plan.lacking if plan.near(one) == near]) == 1:
                    for memfd in opened:
                        there |= {
                            name: _InMemfd(there[name].dtype, there[name].shape, name, memfd)
                            for name in memfd.names()
                            if not isinstance(there[name], _OnDevice)
                        }
                targets = state.targets(kept, received["plain"], there)
                with torch.no_grad():
                    for memfd in opened:
                        memfd.read(targets)
            self._store.set(f"taken {rank}", "")
        for far in self._by_backend(bool(near)):
            mine = {name: targets[name] for name, _, _, is_far, _ in received["tensors"] if is_far is far}
            tensor_transfer.receive(mine, plan.giver(rank), self._wire(far))
        state.restore(kept, received["plain"], targets)
        return ReceivedState(received["step"], received["epoch"], received["layouts"] if plan.alike else [])

    def _shapes(self, received: Mapping[str, Any]) -> dict[str, Shape]:
        """Return the shapes of the tensors in a label. Tensors on a GPU are received on a GPU."""
        device, there = self._membership.device, shapes(received)
        if device.type != "cuda":
            return there
        far = [name for name, _, _, is_far, _ in received["tensors"] if is_far]
        return there | {name: _OnDevice(there[name].dtype, there[name].shape, device) for name in far}

    def _by_backend(self, near: bool) -> tuple[bool, ...]:
        """Return which tensors are sent through the backend: those on a GPU (True), those on the CPU (False)."""
        return () if near and self._by_memory else (True,) if near else (True, False)

    def _wire(self, far: bool) -> torch.device:
        return tensor_transfer.wire(self._membership, far)


@dataclass(frozen=True)
class _OnDevice(Shape):
    """A tensor on the GPU of this rank."""

    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _InMemfd(Shape):
    """A tensor in a memfd that only this rank reads: it can use that memory directly."""

    name: str
    memfd: OpenedMemfd

    def empty(self) -> torch.Tensor:
        return self.memfd.tensor(self.name, self.dtype, self.shape)


def _share(tensors: Mapping[str, torch.Tensor], place: int, count: int) -> dict[str, torch.Tensor]:
    """Return one of `count` parts of about the same size."""
    whole = sum(tensor.nbytes for tensor in tensors.values())
    mine, before = {}, 0
    for name, tensor in tensors.items():
        if min(before * count // max(whole, 1), count - 1) == place:
            mine[name] = tensor
        before += tensor.nbytes
    return mine


def _move_state(kept: Mapping[str, object], offer: StateOffer) -> None:
    """Move the offered state to the current objects of this rank. Many are the same objects."""
    changed = {name for name, thing in kept.items() if thing is not offer.kept.get(name)}
    if not changed:
        return
    held = state.taken(offer.kept)
    sizes = {name: Shape(one.dtype, tuple(one.shape)) for name, one in held.tensors.items()}
    targets = state.targets(kept, held.plain, sizes, only=changed)
    models = {name for name in changed if isinstance(kept[name], torch.nn.Module)}
    with torch.no_grad():
        for name, target in targets.items():
            source = held.tensors[name]
            if any(name.startswith(f"{model}.") for model in models):
                target.copy_(source)
            else:  # an optimizer takes over the tensors themselves: nothing else uses them
                targets[name] = source
    state.restore(kept, held.plain, targets, only=changed)
