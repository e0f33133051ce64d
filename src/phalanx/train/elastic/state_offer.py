"""What a rank holds when its group is lost, and what it tells the others of that when they meet again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from phalanx.train.checkpoint.state import Shape, State
from phalanx.train.data.loader import Loader
from phalanx.train.model import shard_placement
from phalanx.train.model.buckets import Layout
from phalanx.train.settings import OptimizerSettings


@dataclass(frozen=True)
class StateOffer:
    """What a rank held when its group was lost, as of its last committed step."""

    step: int
    epoch: int
    kept: Mapping[str, object] = field(repr=False)
    layouts: list[Layout] = field(default_factory=list)
    rank: int = 0
    world_size: int = 1
    settings: OptimizerSettings | None = field(default=None, repr=False)
    pending: Callable[[], None] | None = field(default=None, repr=False)  # commits the next step, which is prepared

    @property
    def word(self) -> str:
        """For all to know when they meet again."""
        whose = None
        if self.sharded:
            held = shard_placement.held(self.kept)
            whose = [held.index, held.count] if held is not None else [-1, 0]
        laid_out = zlib.crc32(msgspec.json.encode(self.layouts))
        return msgspec.json.encode([self.step, self._epoch(), whose, laid_out, self.pending is not None]).decode()

    def roll_forward(self) -> StateOffer:
        """Commit the prepared step, which other ranks have committed; return what this rank holds then."""
        assert self.pending is not None  # noqa: S101
        self.pending()
        return replace(self, step=self.step + 1, settings=OptimizerSettings(self.kept), pending=None)

    def discard(self) -> StateOffer:
        """Drop the prepared step, which no rank has committed; return what this rank holds then."""
        for thing in self.kept.values():
            if hasattr(thing, "zero_grad"):
                thing.zero_grad(set_to_none=True)
        return replace(self, pending=None)

    def _epoch(self) -> int:
        """After the last step of an epoch, some ranks may be in the next one already."""
        return max([self.epoch, *(thing.epoch for thing in self.kept.values() if isinstance(thing, Loader))])

    def put_back(self) -> None:
        """What a script that is entered again has set in objects which it did not make again."""
        if self.settings is not None:
            self.settings.put_back()

    @property
    def sharded(self) -> bool:
        return shard_placement.is_sharded(self.kept)


# The step, the epoch, which shard of how many, how DDP was laid out, whether the next step is prepared.
Offer = tuple[int, int, list[int] | None, int, bool]
NOTHING: Offer = (-1, 0, None, 0, False)
_offer: msgspec.json.Decoder[Offer] = msgspec.json.Decoder(Offer)


@dataclass(frozen=True)
class ReceivedState:
    step: int
    epoch: int
    layouts: list[Layout]


def offers(words: Sequence[str]) -> list[Offer]:
    """What each rank has, by its word; an empty word: nothing."""
    return [_offer.decode(word) if word else NOTHING for word in words]


def label(held: State, past: StateOffer) -> dict[str, Any]:
    """All that a rank has to know which will hold the same: of tensors, name, type, shape, whether a GPU has them, and
    along which dimension they are sharded."""
    tensors = [
        [name, str(one.dtype).removeprefix("torch."), list(one.shape), one.is_cuda, shard_placement.dimension(one)]
        for name, one in held.tensors.items()
    ]
    return {
        "step": past.step,
        "epoch": past.epoch,
        "layouts": past.layouts,
        "plain": held.plain,
        "tensors": tensors,
    }


def shapes(told: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: Shape(getattr(torch, dtype), tuple(shape)) for name, dtype, shape, _, _ in told["tensors"]}
