"""State from living ranks to those that have none: as raw tensors, from memory to memory.

Whoever is left after a death holds what it held after its last step; most often all of them the same. The newest of
these is what everybody goes on from. Who holds what is told when the ranks meet (`Past.word`), so that there is
nothing to agree on later: those that hold it lay it out in memory for others of their node at once, while those are
still making their objects, and go on without waiting for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.cluster.sharing import HOST
from phalanx.cluster.sources.surroundings import environment
from phalanx.train.checkpoint import state
from phalanx.train.checkpoint.state import Shape
from phalanx.train.elastic import tensor_transfer
from phalanx.train.elastic.memfd_tensors import MemfdTensors, OpenedMemfd, PackingThread
from phalanx.train.elastic.shard_handover import ShardDeal, ShardHandover, receive_label, send_label
from phalanx.train.elastic.state_offer import ReceivedState, StateOffer, label, offers, shapes
from phalanx.worker.rendezvous.membership import Membership
from phalanx.worker.rendezvous.store import Store


@dataclass(frozen=True)
class Deal:
    """Who has the newest state, and who needs it."""

    holders: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()
    nodes: Sequence[Sequence[int]] = ()
    alike: bool = False  # their DDPs were laid out alike

    @classmethod
    def of(cls, words: Sequence[str], nodes: Sequence[Sequence[int]]) -> Deal:
        """No holders: nobody has any state, or what they have are shards."""
        told = offers(words)
        places = [(step, epoch) for step, epoch, *_ in told]
        newest = max(places)
        holders = tuple(rank for rank, place in enumerate(places) if place == newest)
        lacking = tuple(rank for rank, place in enumerate(places) if place != newest)
        if newest[0] < 0 or any(whose for _, _, whose, *_ in told):
            return cls()
        return cls(holders, lacking, nodes, len({told[rank][3] for rank in holders}) == 1)

    def near(self, rank: int) -> tuple[int, ...]:
        """Holders on its node."""
        node = next((node for node in self.nodes if rank in node), ())
        return tuple(holder for holder in self.holders if holder in node)

    def giver(self, rank: int) -> int:
        """By the backend: one for each that lacks it, of its own node where there is one."""
        choice = self.near(rank) or self.holders
        return choice[self.lacking.index(rank) % len(choice)]


class Handover:
    """Of one generation, as one rank sees it."""

    def __init__(self, membership: Membership, past: StateOffer | None) -> None:
        self._rank = membership.identity.rank
        self._membership = membership
        # Where NCCL takes the ranks of a node for several hosts, it is much slower than memory that they share.
        self._by_memory = HOST in environment() and membership.device.type == "cuda"
        words, nodes = [person.word for person in membership.people], membership.topology.nodes
        self._deal, self._shards = Deal.of(words, nodes), ShardDeal.of(offers(words), nodes)
        self.past = self._settled(past)
        self._store = Store(dist.PrefixStore("handover", membership.store), membership.timeout)
        self._packing: PackingThread | None = None
        self.spoilt = False  # the objects of the past are being written over

    def _settled(self, past: StateOffer | None) -> StateOffer | None:
        """What this rank holds once a prepared step is committed or dropped, as the survivors have decided."""
        if past is None or past.pending is None:
            return past
        if self._shards is not None and self._shards.step == past.step + 1:
            return past.roll_forward()
        return past.discard()

    @property
    def awaited(self) -> bool:
        """Somebody has the state that all go on from."""
        return bool(self._deal.holders) or self._shards is not None

    def prepare(self) -> None:
        """Lay out this rank's part of what others of its node will come for, in a thread, while the group forms."""
        deal, rank, past = self._deal, self._rank, self.past
        if past is None or rank not in deal.holders or not self._takers():
            return
        past.put_back()
        held = state.taken(past.kept)
        near = {name: tensor for name, tensor in held.tensors.items() if self._by_memory or not tensor.is_cuda}
        givers = deal.near(rank)
        mine = _share(near, givers.index(rank), len(givers))
        named = label(held, past) if rank == givers[0] else {}
        self._packing = PackingThread(lambda: self._pack(mine, named))

    def _pack(self, tensors: Mapping[str, torch.Tensor], named: dict[str, object]) -> MemfdTensors:
        parcel = MemfdTensors(tensors, named)
        self._store.set(f"from {self._rank}", parcel.address)
        return parcel

    def complete(self, kept: Mapping[str, object]) -> ReceivedState | None:
        """The newest state is in the objects of this rank. None: there is none to be had."""
        deal, rank, past = self._deal, self._rank, self.past
        self.past = None
        if self._shards is not None:
            return ShardHandover(self._membership, self._store, self._shards).complete(kept, past)
        if not deal.holders:
            return None
        if rank in deal.holders and past is not None:
            if self._packing is not None:
                self._packing.result()  # from here on the script may change these tensors
            past.put_back()
            self._send(past)
            _keep_on(kept, past)
            return ReceivedState(past.step, past.epoch, past.layouts if deal.alike else [])
        self.spoilt = past is not None and any(thing is past.kept.get(name) for name, thing in kept.items())
        return self._receive(kept)

    def conclude(self) -> None:
        """After the first step, for which all had to be there: nobody needs the parcel any more."""
        if self._packing is not None:
            self._store.wait(*(f"taken {rank}" for rank in self._takers()))
            self.close()

    def close(self) -> None:
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.close()

    def _takers(self) -> list[int]:
        return [rank for rank in self._deal.lacking if self._rank in self._deal.near(rank)]

    def _send(self, past: StateOffer) -> None:
        takers = [rank for rank in self._deal.lacking if self._deal.giver(rank) == self._rank]
        if not takers:
            return
        held = state.taken(past.kept)
        for taker in takers:
            near = bool(self._deal.near(taker))
            if not near:
                send_label(self._store, label(held, past), taker, self._wire(False))
            for far in self._by_backend(near):
                theirs = {name: one for name, one in held.tensors.items() if one.is_cuda is far}
                tensor_transfer.send(theirs, taker, self._wire(far))

    def _receive(self, kept: Mapping[str, object]) -> ReceivedState:
        deal, rank = self._deal, self._rank
        near = deal.near(rank)
        if not near:
            told = receive_label(self._store, rank, deal.giver(rank), self._wire(False))
            targets = state.targets(kept, told["plain"], shapes(told))
        else:
            with contextlib.ExitStack() as stack:
                parcels = [stack.enter_context(OpenedMemfd(self._store.get(f"from {one}").decode())) for one in near]
                told = parcels[0].label
                there = shapes(told)
                if len([one for one in deal.lacking if deal.near(one) == near]) == 1:
                    for parcel in parcels:
                        there |= {
                            name: _There(there[name].dtype, there[name].shape, name, parcel) for name in parcel.names()
                        }
                targets = state.targets(kept, told["plain"], there)
                with torch.no_grad():
                    for parcel in parcels:
                        parcel.read(targets)
            self._store.set(f"taken {rank}", "")
        for far in self._by_backend(bool(near)):
            mine = {name: targets[name] for name, _, _, is_far, _ in told["tensors"] if is_far is far}
            tensor_transfer.receive(mine, deal.giver(rank), self._wire(far))
        state.restore(kept, told["plain"], targets)
        return ReceivedState(told["step"], told["epoch"], told["layouts"] if deal.alike else [])

    def _by_backend(self, near: bool) -> tuple[bool, ...]:
        """Which tensors go by the backend: those on a GPU (True), those of the CPU (False)."""
        return () if near and self._by_memory else (True,) if near else (True, False)

    def _wire(self, far: bool) -> torch.device:
        return tensor_transfer.wire(self._membership, far)


@dataclass(frozen=True)
class _There(Shape):
    """A tensor that lies in a parcel, in which nobody else is interested."""

    name: str
    parcel: OpenedMemfd

    def empty(self) -> torch.Tensor:
        return self.parcel.tensor(self.name, self.dtype, self.shape)


def _share(tensors: Mapping[str, torch.Tensor], place: int, count: int) -> dict[str, torch.Tensor]:
    """One of `count` parts of about the same size."""
    whole = sum(tensor.nbytes for tensor in tensors.values())
    mine, before = {}, 0
    for name, tensor in tensors.items():
        if min(before * count // max(whole, 1), count - 1) == place:
            mine[name] = tensor
        before += tensor.nbytes
    return mine


def _keep_on(kept: Mapping[str, object], past: StateOffer) -> None:
    """What this rank held, in the objects that it has now; many are the very ones."""
    changed = {name for name, thing in kept.items() if thing is not past.kept.get(name)}
    if not changed:
        return
    held = state.taken(past.kept)
    sizes = {name: Shape(one.dtype, tuple(one.shape)) for name, one in held.tensors.items()}
    targets = state.targets(kept, held.plain, sizes, only=changed)
    models = {name for name in changed if isinstance(kept[name], torch.nn.Module)}
    with torch.no_grad():
        for name, target in targets.items():
            source = held.tensors[name]
            if any(name.startswith(f"{model}.") for model in models):
                target.copy_(source)
            else:  # an optimizer takes over the tensors themselves: nobody else will use them
                targets[name] = source
    state.restore(kept, held.plain, targets, only=changed)
