"""Sends parts of a snapshot from node to node, over separate connections.

On the connections of the training a large part would delay its collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import LaunchError
from phalanx.train.snapshot import part
from phalanx.train.snapshot.part import Seal
from phalanx.worker.process_group.aborter import GroupAborter

_CHUNK = 64 << 20  # bytes per message


@dataclass(frozen=True)
class Transfer:
    """A part that one rank sends to another."""

    name: str
    sender: int
    receiver: int


class Exchange:
    """The connections between nodes. All ranks must create it together, like every process group."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank = rank
        self._aborter = GroupAborter()
        with self._aborter.watching():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def carry(
        self, transfers: Sequence[Transfer], show: Callable[[str], int], lend: Callable[[str, int], int]
    ) -> list[int]:
        """Do all transfers at once; every rank passes the same list. Returns the received parts, which the caller must
        close.

        A part for which there is no memory here is not sent; LaunchError is raised after the others have been received.
        """
        memories: dict[int, int] = {}
        try:
            self._carry(transfers, show, lend, memories)
        except BaseException:
            for fd in memories.values():
                os.close(fd)
            raise
        return list(memories.values())

    def _carry(
        self,
        transfers: Sequence[Transfer],
        show: Callable[[str], int],
        lend: Callable[[str, int], int],
        memories: dict[int, int],
    ) -> None:
        out = [tag for tag, one in enumerate(transfers) if one.sender == self._rank]
        for tag in out:
            memories[tag] = show(transfers[tag].name)
        seals = {tag: _numbers(part.read_seal(fd)) for tag, fd in memories.items()}
        seals |= {tag: torch.zeros(3, dtype=torch.int64) for tag in self._coming(transfers)}
        self._pass(transfers, {tag: [seal] for tag, seal in seals.items()})
        refusal: LaunchError | None = None
        taken = {tag: torch.zeros(1, dtype=torch.int64) for tag in seals}
        for tag in self._coming(transfers):
            try:
                fd = lend(transfers[tag].name, _seal(seals[tag]).end)
            except LaunchError as error:
                refusal = error
                continue
            part.break_seal(fd)
            memories[tag] = fd
            taken[tag][0] = 1
        self._pass(transfers, {tag: [one] for tag, one in taken.items()}, back=True)
        agreed = [tag for tag in memories if int(taken[tag]) and _seal(seals[tag]).end]
        self._pass(transfers, {tag: part.body(memories[tag], _seal(seals[tag]).end).split(_CHUNK) for tag in agreed})
        for tag in out:
            os.close(memories.pop(tag))
        for tag, fd in memories.items():
            if tag in agreed:
                part.make_seal(fd, _seal(seals[tag]))
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Cut the connections, so that no thread waits for them."""
        self._aborter.disconnect()

    def _coming(self, transfers: Sequence[Transfer]) -> list[int]:
        return [tag for tag, one in enumerate(transfers) if one.receiver == self._rank]

    def _pass(
        self, transfers: Sequence[Transfer], tensors: dict[int, Sequence[torch.Tensor]], *, back: bool = False
    ) -> None:
        """Send from senders to receivers, or back. All operations start before the first wait, so that no order of
        ranks can deadlock.
        """
        works: list[Any] = []
        for tag, parts in tensors.items():
            one = transfers[tag]
            sends = (one.sender == self._rank) is not back
            for tensor in parts:
                if sends:
                    works.append(dist.isend(tensor, one.sender if back else one.receiver, self._group, tag))
                else:
                    works.append(dist.irecv(tensor, one.receiver if back else one.sender, self._group, tag))
        for work in works:
            work.wait()


def _numbers(seal: Seal | None) -> torch.Tensor:
    """Return a seal as a tensor; zeros: there is none."""
    return torch.tensor([seal.begin, seal.length, seal.checksum] if seal is not None else [0, 0, 0], dtype=torch.int64)


def _seal(numbers: torch.Tensor) -> Seal:
    begin, length, checksum = numbers.tolist()
    return Seal(begin, length, checksum)
