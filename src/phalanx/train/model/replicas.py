"""The arrangement of ranks with "hsdp": each row of ranks shards one replica of the model.

A row is usually a node: shards are gathered within it, and only gradients cross the network.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import OptionError

Rows = tuple[tuple[int, ...], ...]


def rows(nodes: Sequence[Sequence[int]], shards: int | None = None, *, elastic: bool = False) -> Rows:
    """Return the ranks of each replica.

    shards   ranks per replica. Default: those of a node; with one node, half of its ranks
    elastic  the number of ranks has changed since the start. If `shards` does not divide it, use the next larger
             number that does, which needs no more memory per rank, instead of raising
    """
    flat = [rank for ranks in nodes for rank in ranks]
    count = shards if shards is not None else _default(nodes)
    if shards is not None and not (isinstance(shards, int) and shards >= 1):
        raise OptionError(
            f"shards={shards!r}: a replica has one shard or more", fix='run.wrap(model, "hsdp", shards=2)'
        )
    if len(flat) % count or (shards is None and not _even(nodes)):
        if not elastic:
            raise _impossible(nodes, shards)
        count = next(size for size in range(min(count, len(flat)), len(flat) + 1) if len(flat) % size == 0)
    return tuple(tuple(flat[begin : begin + count]) for begin in range(0, len(flat), count))


def _default(nodes: Sequence[Sequence[int]]) -> int:
    if len(nodes) > 1:
        return max(map(len, nodes))
    return (len(nodes[0]) + 1) // 2


def _even(nodes: Sequence[Sequence[int]]) -> bool:
    """Return whether there is a default: nodes of the same size, or one node with an even number of ranks."""
    return len({*map(len, nodes)}) == 1 and (len(nodes) > 1 or len(nodes[0]) == 1 or len(nodes[0]) % 2 == 0)


def _impossible(nodes: Sequence[Sequence[int]], shards: int | None) -> OptionError:
    size = sum(map(len, nodes))
    fits = [count for count in range(1, size + 1) if size % count == 0]
    possible = f"shards=N with an N that divides {size}: {', '.join(map(str, fits))} ({size}: one replica, as in fsdp)"
    if shards is not None:
        return OptionError(
            f'"hsdp" with shards={shards}: {size} ranks cannot be divided into replicas of {shards} ranks',
            details=[f"expected {possible}"],
            fix=f'run.wrap(model, "hsdp", shards={fits[-2] if len(fits) > 1 else 1}), or another number of ranks',
        )
    if len(nodes) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in nodes)
        return OptionError(
            f'"hsdp" makes each node a replica, and these nodes have different numbers of ranks: {sizes}',
            details=["expected the same number on every node", f"or {possible}"],
            fix=f'run.wrap(model, "hsdp", shards={fits[-2]}), or run.wrap(model, "fsdp")',
        )
    return OptionError(
        f'"hsdp" on one node makes two replicas, and {size} ranks cannot be halved',
        details=["expected an even number of ranks", f"or {possible}"],
        fix=f'phalanx run -g {size + 1}, or run.wrap(model, "fsdp")',
    )
