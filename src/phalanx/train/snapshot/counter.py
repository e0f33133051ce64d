"""How far a rank had come when it died: a number in memory that outlives it."""

from __future__ import annotations

import mmap
import os
import struct

from phalanx.join.vault import Vault

_NUMBER = struct.Struct("<q")
_PREFIX = "steps."


class Counter:
    def __init__(self, vault: Vault, rank: int) -> None:
        fd = vault.lend(counter_name(rank), mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)

    def set(self, step: int) -> None:
        _NUMBER.pack_into(self._memory, 0, step)

    def close(self) -> None:
        self._memory.close()


def counter_name(rank: int) -> str:
    return f"{_PREFIX}{rank}"


def is_counter(name: str) -> bool:
    return name.startswith(_PREFIX)


def reached(vault: Vault) -> int:
    """The newest step that any rank of this node had committed."""
    steps = [0]
    for name in filter(is_counter, vault.names()):
        fd = vault.show(name)
        steps += _NUMBER.unpack(os.pread(fd, _NUMBER.size, 0))
        os.close(fd)
    return max(steps)
