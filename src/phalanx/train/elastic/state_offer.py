"""The state that a rank has when its group is lost, and its offer to the other ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from phalanx.train.checkpoint.state import Shape, State
from phalanx.train.data.loader import Loader
from phalanx.train.elastic.committed_buffers import CommittedBuffers
from phalanx.train.model import shard_placement
from phalanx.train.model.buckets import Layout
from phalanx.train.settings import OptimizerSettings


@dataclass(frozen=True)
class StateOffer:
    """What a rank had when its group was lost, as of its last committed step."""

    step: int
    epoch: int
    kept: Mapping[str, object] = field(repr=False)
    layouts: list[Layout] = field(default_factory=list)
    rank: int = 0
    world_size: int = 1
    settings: OptimizerSettings | None = field(default=None, repr=False)
    pending: Callable[[], None] | None = field(default=None, repr=False)  # commits the next step, which is prepared
    buffers: CommittedBuffers | None = field(default=None, repr=False)  # with `pending`: what its forward changed

    @property
    def encoded(self) -> str:
        """The offer as text, for the roll call."""
        shard = None
        if self.sharded:
            held = shard_placement.held(self.kept)
            shard = [held.index, held.count] if held is not None else [-1, 0]
        laid_out = zlib.crc32(msgspec.json.encode(self.layouts))
        return msgspec.json.encode([self.step, self._epoch(), shard, laid_out, self.pending is not None]).decode()

    def roll_forward(self) -> StateOffer:
        """Commit the prepared step, which other ranks have committed; return what this rank then has."""
        assert self.pending is not None  # noqa: S101
        self.pending()
        return replace(self, step=self.step + 1, settings=OptimizerSettings(self.kept), pending=None)

    def discard(self) -> StateOffer:
        """Drop the prepared step, which no rank has committed; return what this rank then has."""
        for thing in self.kept.values():
            if hasattr(thing, "zero_grad"):
                thing.zero_grad(set_to_none=True)
        if self.buffers is not None:
            self.buffers.put_back()
        return replace(self, pending=None)

    def _epoch(self) -> int:
        """Return the epoch of the loaders: after the last step of an epoch some ranks may be in the next."""
        return max([self.epoch, *(thing.epoch for thing in self.kept.values() if isinstance(thing, Loader))])

    def put_back(self) -> None:
        """Restore the optimizer settings: the script may have changed them in objects that it did not create again."""
        if self.settings is not None:
            self.settings.put_back()

    @property
    def sharded(self) -> bool:
        """Whether this rank has a shard, not the whole state."""
        return shard_placement.is_sharded(self.kept)


# Step, epoch, [shard, number of shards], checksum of DDP's buckets, whether the next step is prepared.
Offer = tuple[int, int, list[int] | None, int, bool]
NOTHING: Offer = (-1, 0, None, 0, False)
_offer: msgspec.json.Decoder[Offer] = msgspec.json.Decoder(Offer)


@dataclass(frozen=True)
class ReceivedState:
    """The origin of a state that was handed over."""

    step: int
    epoch: int
    layouts: list[Layout]


def offers(encoded: Sequence[str]) -> list[Offer]:
    """Decode the offers of all ranks; an empty text: the rank has no state."""
    return [_offer.decode(text) if text else NOTHING for text in encoded]


def label(held: State, offer: StateOffer) -> dict[str, Any]:
    """Return everything that the receiver needs besides the bytes.

    For each tensor: name, dtype, shape, whether it is on a GPU, and along which dimension it is sharded. `sharded`:
    names of the objects that have such tensors.
    """
    tensors = [
        [name, str(one.dtype).removeprefix("torch."), list(one.shape), one.is_cuda, shard_placement.dimension(one)]
        for name, one in held.tensors.items()
    ]
    return {
        "step": offer.step,
        "epoch": offer.epoch,
        "layouts": offer.layouts,
        "plain": held.plain,
        "tensors": tensors,
        "sharded": held.sharded,
    }


def shapes(label: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors in a label."""
    return {name: Shape(getattr(torch, dtype), tuple(shape)) for name, dtype, shape, _, _ in label["tensors"]}
