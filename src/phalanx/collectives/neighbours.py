"""Which ranks of a group are on the same host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from phalanx.forkserver.signed_store import SignedStore

from .errors import CollectiveTimeout

_NO_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks of a group, per host. `mine` is the index of this rank's host."""

    hosts: tuple[tuple[int, ...], ...]  # ranks of the group per host, ordered by their lowest rank
    mine: int

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks on this host."""
        return self.hosts[self.mine]


def find(store: SignedStore, rank: int, size: int, timeout: float) -> Neighbours:
    """Find the hosts of all ranks, through the group's store. `timeout` in seconds; 0: none."""
    store.set(_key(rank), host_id())
    keys = [_key(other) for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout) if timeout else _NO_TIMEOUT)
    except RuntimeError as error:
        late = [other for other in range(size) if not store.check([_key(other)])]
        if not late:
            raise
        raise CollectiveTimeout(
            f"a group of {size} ranks waited {timeout:g} s for {format_ranks(late)} to join"
        ) from error
    return by_host([one.decode() for one in store.multi_get(keys)], rank)


def by_host(host_ids: list[str], rank: int) -> Neighbours:
    """Group ranks by host. `host_ids`: one per rank."""
    by_id: dict[str, list[int]] = {}
    for other, one in enumerate(host_ids):
        by_id.setdefault(one, []).append(other)
    hosts = tuple(tuple(ranks) for ranks in by_id.values())
    return Neighbours(hosts, [*by_id].index(host_ids[rank]))


def host_id() -> str:
    """Return a string that is equal for two processes that can share memory: same kernel, namespaces and user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"


def format_ranks(ranks: Iterable[int], names: Sequence[int] = ()) -> str:
    """Return "rank 3", "ranks 1 and 3", or "rank 3 (of this group: 1)" if `names` has another global rank for it."""
    words = [
        str(rank) if not names or names[rank] == rank else f"{names[rank]} (of this group: {rank})"
        for rank in sorted(ranks)
    ]
    if not words:
        return "no rank"
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _key(rank: int) -> str:
    return f"host of {rank}"
