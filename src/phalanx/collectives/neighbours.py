"""Which ranks of a group share a machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .errors import CollectiveTimeout

_EVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Neighbours:
    machines: tuple[tuple[int, ...], ...]  # ranks of the group by machine, in the order of their lowest
    mine: int

    @property
    def here(self) -> tuple[int, ...]:
        return self.machines[self.mine]


def find(store: dist.Store, rank: int, size: int, timeout: float) -> Neighbours:
    """Every rank says through the group's store where it is. Seconds; 0: for ever."""
    store.set(_key(rank), machine())
    keys = [_key(other) for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout) if timeout else _EVER)
    except RuntimeError as error:
        late = [other for other in range(size) if not store.check([_key(other)])]
        if not late:
            raise
        raise CollectiveTimeout(f"a group of {size} ranks waited {timeout:g} s for {named(late)} to come") from error
    return sort([place.decode() for place in store.multi_get(keys)], rank)


def sort(places: list[str], rank: int) -> Neighbours:
    """`places`: of each rank."""
    by_place: dict[str, list[int]] = {}
    for other, place in enumerate(places):
        by_place.setdefault(place, []).append(other)
    machines = tuple(tuple(ranks) for ranks in by_place.values())
    return Neighbours(machines, [*by_place].index(places[rank]))


def machine() -> str:
    """The same for two processes that can see each other and share memory: kernel, namespaces, user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"


def named(ranks: Iterable[int], names: Sequence[int] = ()) -> str:
    """rank 3; ranks 1 and 3; rank 3 (of this group: 1), where `names` are their numbers in the world"""
    words = [
        str(rank) if not names or names[rank] == rank else f"{names[rank]} (of this group: {rank})"
        for rank in sorted(ranks)
    ]
    if len(words) < 2:
        return f"rank {''.join(words)}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _key(rank: int) -> str:
    return f"machine of {rank}"
