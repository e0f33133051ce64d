"""In which order samples are taken, and by whom: pure, and the same on every machine.

order = Order(length=50_000, seed=0, epoch=3, shuffle=True)
step = share(Position(3, 640), 50_000, batches=(32, 32), last="drop")
mine = step.portion(rank)
[order[place] for place in mine.places]    # indices into the data set

The order depends on (seed, epoch, length, shuffle) and on nothing else. A step of all ranks together takes the next run
of it, so a `Position` (epoch, consumed) says all about what is done and what is left, whatever number of ranks is next.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from phalanx.errors import UsageError

Places = TypeVar("Places", int, Any)
Last = Literal["drop", "pad", "uneven"]

# Even numbers. A small rectangle mixes less in a round, and costs little: there every permutation is about as likely.
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 6, 16, 1024
_WORD = 0xFFFFFFFF


class Order:
    """The order of one epoch: `order[place]` is an index into the data set.

    A keyed bijection (a Feistel network over rows and columns of a rectangle that just holds `length`, walked until it
    hits a place inside), computed place by place: nothing is stored, so a thousand million samples cost as little as
    ten, and a resumed rank starts anywhere at once. It is integer arithmetic and BLAKE2b alone. `torch.randperm` is not
    used: torch does not promise the same numbers in its next release, and every rank would hold the whole of it.
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
        """Walk on, if the walk has led out of the order."""
        while place >= self.length:
            place = self.permute(place)
        return place

    def permute(self, place: Places) -> Places:
        """One walk over the rectangle, for a place or for many: a tensor of 64-bit integers computes as one does."""
        # Each round adds to one half what a hash of the other says: undone by subtracting, so no two places collide.
        rows, columns = self._rows, self._columns
        left, right = place // columns, place % columns
        for key in self._keys:
            mixed = right ^ key
            # In place, which for a tensor of many places is what saves the time.
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
    """How far the training has come: `consumed` places of the epoch's order are done with; at its end, all of them."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Portion:
    """One rank's batch in one step: places in the order. The last ones are padding, which must not count."""

    places: tuple[int, ...] | range
    count: int  # how many of them count


class Step(NamedTuple):
    """What all ranks take together: `counts` samples each, filled up to `sizes` by padding."""

    position: Position
    next: Position
    length: int
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int

    def portion(self, rank: int) -> Portion:
        count, size = self.counts[rank], self.sizes[rank]
        start = self.position.consumed + sum(self.counts[:rank])
        if count == size:
            return Portion(range(start, start + count), count)
        before = sum(self.sizes[:rank]) - sum(self.counts[:rank])
        padding = ((before + extra) % self.length for extra in range(size - count))
        return Portion((*range(start, start + count), *padding), count)

    def scale(self, rank: int) -> float:
        """What a rank's mean loss is multiplied by, so that the mean over ranks is the mean over samples."""
        return len(self.counts) * self.counts[rank] / self.total


def share(position: Position, length: int, batches: tuple[int, ...], last: Last) -> Step | None:
    """The next step, or None at the end of the epoch. `batches`: how many samples each rank takes in a full step.

    What is left at the end and is less than a full step:

    - drop: nobody takes it, and the epoch ends with the last full step;
    - pad: every rank has its full batch, filled up with samples from the start of the order, which do not count;
    - uneven: it is dealt in proportion to `batches`; a rank left with nothing gets one sample that does not count.

    So every rank takes part in every step, with at least one sample, and no collective waits for anybody.
    """
    whole = sum(batches)
    left = length - position.consumed
    if left >= whole:
        consumed = position.consumed + whole
        if last == "drop" and length - consumed < whole:
            consumed = length  # the tail is passed over with the last step: the epoch is over at any later batch size
        return Step(position, Position(position.epoch, consumed), length, batches, batches, whole)
    if left <= 0 or last == "drop":
        return None
    if last == "pad":
        counts, sizes = _fill(left, batches), batches
    else:
        counts = apportion(left, batches)
        sizes = tuple(max(1, count) for count in counts)
    return Step(position, Position(position.epoch, length), length, counts, sizes, left)


def steps(position: Position, length: int, batches: tuple[int, ...], last: Last) -> Iterator[Step]:
    """All steps from here to the end of the epoch."""
    while step := share(position, length, batches, last):
        yield step
        position = step.next


def count_steps(length: int, batches: tuple[int, ...], last: Last) -> int:
    """How many steps an epoch has."""
    whole = sum(batches)
    return length // whole if last == "drop" else -(-length // whole)


def deal(global_batch: int, world_size: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """The global batch as a whole number of samples for each rank, in proportion to `weights`, at least one each."""
    if weights is None:
        weights = [1.0] * world_size
    if len(weights) != world_size:
        raise UsageError(
            f"{len(weights)} weights for {world_size} ranks",
            details=[f"weights: {list(weights)}"],
            fix=f"give one weight for each of the {world_size} ranks, or none",
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UsageError(
            f"a rank's weight has to be a number above 0: {list(weights)}",
            fix="leave a rank out of the run if it is to have no data",
        )
    if global_batch < world_size:
        raise UsageError(
            f"a global batch of {global_batch} is too small for {world_size} ranks: each needs at least one sample",
            fix=f"global_batch={world_size} or more, or fewer ranks",
        )
    sizes = list(apportion(global_batch, weights))
    # Whoever got nothing takes from whoever has most.
    for rank in range(world_size):
        if not sizes[rank]:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[rank] = 1
    return tuple(sizes)


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` in whole parts in proportion to `weights`: the largest remainders are rounded up, low ranks first."""
    whole = math.fsum(weights)
    quotas = [total * weight / whole for weight in weights]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda rank: (parts[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def check_last(last: str) -> Last:
    if last not in get_args(Last):
        raise UsageError(f"last={last!r} is none of the ways to end an epoch", fix='last="drop", "pad" or "uneven"')
    return last  # type: ignore[return-value]


def _fill(left: int, batches: tuple[int, ...]) -> tuple[int, ...]:
    counts = []
    for batch in batches:
        counts.append(min(batch, left))
        left -= counts[-1]
    return tuple(counts)
