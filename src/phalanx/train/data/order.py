"""The order in which samples are read, and by which rank: pure functions, the same on every host.

order = Order(length=50_000, seed=0, epoch=3, shuffle=True)
step = share(Position(3, 640), 50_000, batches=(32, 32), tail="drop")
mine = step.portion(rank)
[order[place] for place in mine.places]    # indices into the data set

The order depends only on (seed, epoch, length, shuffle). A step of all ranks together takes the next samples of it, so
a `Position` (epoch, consumed) says what is done and what is left, for any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from phalanx.errors import UsageError

Places = TypeVar("Places", int, Any)
Tail = Literal["drop", "pad", "uneven", "every"]  # what happens to the last samples: see `share`

# Even numbers. A small rectangle mixes less per round and is cheap, so it gets more rounds.
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 6, 16, 1024
_WORD = 0xFFFFFFFF


class Order:
    """The order of one epoch: `order[place]` is an index into the data set.

    A keyed bijection (a Feistel network over rows and columns of a rectangle that just holds `length`, walked until it
    hits a place inside), computed place by place. Nothing is stored, so a billion samples cost as little as ten, and a
    resumed rank can start anywhere. It uses only integer arithmetic and BLAKE2b. `torch.randperm` is not used: torch
    does not guarantee the same numbers in its next release, and every rank would hold the whole permutation.
    """

    def __init__(self, length: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> None:
        self.length = length
        self.shuffle = shuffle and length > 1
        self._rows = math.isqrt(max(length - 1, 0)) + 1
        self._columns = -(-length // self._rows) if length else 1
        text = f"phalanx order {seed} {epoch} {length}".encode()
        key = hashlib.blake2b(text, digest_size=4 * (_ROUNDS if length > _FEW else _ROUNDS_OF_FEW)).digest()
        self._keys = [int.from_bytes(key[at : at + 4], "little") for at in range(0, len(key), 4)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.length:
            raise IndexError(f"place {place} of an order of {self.length}")
        if not self.shuffle:
            return place
        return self.inside(self.permute(place))

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.length))

    def inside(self, place: int) -> int:
        """Permute again until the place is inside the order."""
        while place >= self.length:
            place = self.permute(place)
        return place

    def permute(self, place: Places) -> Places:
        """Permute a place of the rectangle, or a tensor of places."""
        # Each round adds a hash of one half to the other. Subtracting undoes it, so no two places collide.
        rows, columns = self._rows, self._columns
        left, right = place // columns, place % columns
        for key in self._keys:
            mixed = right ^ key
            # In place, which is much faster for a tensor of many places.
            mixed ^= mixed >> 16
            mixed *= 0x7FEB352D
            mixed &= _WORD
            mixed ^= mixed >> 15
            mixed *= 0x846CA68B
            mixed &= _WORD
            mixed ^= mixed >> 16
            mixed += left
            mixed %= rows
            left, right = right, mixed
            rows, columns = columns, rows
        return left * columns + right


class Position(NamedTuple):
    """How far the training is: `consumed` places of the epoch's order are done; at its end, all of them."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Portion:
    """One rank's batch in one step: places in the order. The last ones may be padding."""

    places: tuple[int, ...] | range
    count: int  # without padding


class Step(NamedTuple):
    """The batches of all ranks in one step: `counts` samples each, padded to `sizes`."""

    position: Position
    next: Position
    length: int
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int

    def portion(self, rank: int) -> Portion:
        """Return the batch of a rank."""
        count, size = self.counts[rank], self.sizes[rank]
        start = self.position.consumed + sum(self.counts[:rank])
        if count == size:
            return Portion(range(start, start + count), count)
        before = sum(self.sizes[:rank]) - sum(self.counts[:rank])
        padding = ((before + extra) % self.length for extra in range(size - count))
        return Portion((*range(start, start + count), *padding), count)

    def scale(self, rank: int) -> float:
        """Return the weight of a rank's mean loss, with which the mean over ranks is the mean over samples."""
        return len(self.counts) * self.counts[rank] / self.total


def share(position: Position, length: int, batches: tuple[int, ...], tail: Tail) -> Step | None:
    """Return the next step, or None at the end of the epoch. `batches`: samples per rank in a full step.

    What happens to the last samples, which do not fill a step:

    - drop: they are dropped, and the epoch ends with the last full step;
    - pad: every rank has a full batch, padded with samples from the start of the order, which do not count;
    - uneven: they are divided in proportion to `batches`; a rank without any gets one sample that does not count;
    - every: for evaluation. No sample is dropped, and none is given twice: samples too few for all ranks go to the last
      full step, whose batches then have one more. Only if there are fewer samples than ranks, some ranks get none.

    So every rank takes part in every step, with at least one sample, and no collective hangs.
    """
    if tail == "every":
        return _share_every(position, length, batches)
    whole = sum(batches)
    left = length - position.consumed
    if left >= whole:
        consumed = position.consumed + whole
        if tail == "drop" and length - consumed < whole:
            consumed = length  # skip the rest with the last step: the epoch is over for any later batch size
        return Step(position, Position(position.epoch, consumed), length, batches, batches, whole)
    if left <= 0 or tail == "drop":
        return None
    if tail == "pad":
        counts, sizes = _fill(left, batches), batches
    else:
        counts = apportion(left, batches)
        sizes = tuple(max(1, count) for count in counts)
    return Step(position, Position(position.epoch, length), length, counts, sizes, left)


def _share_every(position: Position, length: int, batches: tuple[int, ...]) -> Step | None:
    whole, ranks, left = sum(batches), len(batches), length - position.consumed
    if left <= 0 or (left < ranks and position.consumed):  # a stream: the previous step has taken them
        return None
    if left >= whole + ranks:
        counts = batches
    elif left >= whole:
        counts = tuple(batch + (rank < left - whole) for rank, batch in enumerate(batches))
    elif left >= ranks:
        counts = _at_least_one(left, batches)
    else:
        counts = _fill(left, (1,) * ranks)
    total = sum(counts)
    return Step(position, Position(position.epoch, position.consumed + total), length, counts, counts, total)


def steps(position: Position, length: int, batches: tuple[int, ...], tail: Tail) -> Iterator[Step]:
    """Yield all steps from here to the end of the epoch."""
    while step := share(position, length, batches, tail):
        yield step
        position = step.next


def count_steps(length: int, batches: tuple[int, ...], tail: Tail) -> int:
    """Return the number of steps of an epoch."""
    full, rest = divmod(length, sum(batches))
    if tail == "drop":
        return full
    if tail == "every":
        return max(full + (rest >= len(batches)), int(length > 0))
    return full + (rest > 0)


def deal(global_batch: int, world_size: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Divide the global batch among the ranks in proportion to `weights`, with at least one sample each."""
    if weights is None:
        weights = [1.0] * world_size
    if not hasattr(weights, "__len__"):
        raise UsageError(f"weights={weights!r}: expected one number per rank", fix=f"weights={[1] * world_size}")
    if len(weights) != world_size:
        raise UsageError(
            f"{len(weights)} weights for {world_size} ranks",
            details=[f"weights: {list(weights)}"],
            fix=f"give one weight for each of the {world_size} ranks, or none",
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UsageError(
            f"weights must be greater than 0: {list(weights)}",
            fix="use fewer ranks",
        )
    if global_batch < world_size:
        raise UsageError(
            f"a global batch of {global_batch} is too small for {world_size} ranks: each needs at least one sample",
            fix=f"global_batch={world_size} or more, or fewer ranks",
        )
    return _at_least_one(global_batch, weights)


def _at_least_one(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    sizes = list(apportion(total, weights))
    # A rank without samples gets one from the rank with the most.
    for rank, size in enumerate(sizes):
        if not size:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[rank] = 1
    return tuple(sizes)


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` in proportion to `weights`: the largest remainders are rounded up, low ranks first."""
    whole = math.fsum(weights)
    quotas = [total * weight / whole for weight in weights]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda rank: (parts[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def _fill(left: int, batches: tuple[int, ...]) -> tuple[int, ...]:
    counts = []
    for batch in batches:
        counts.append(min(batch, left))
        left -= counts[-1]
    return tuple(counts)
