"""Finds, checks and loads the newest snapshot that the agents of all nodes hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.errors import CheckpointError, LaunchError
from phalanx.train.checkpoint import loading, randomness, state
from phalanx.train.checkpoint.format.folder import Info
from phalanx.train.checkpoint.format.manifest import Values
from phalanx.train.checkpoint.format.plain import Tensors, unpacked
from phalanx.train.snapshot.counter import is_counter
from phalanx.train.snapshot.exchange import Exchange, Transfer
from phalanx.train.snapshot.found import FoundSnapshot, HeldPart, newest, transfers
from phalanx.train.snapshot.part import Part, differences, read
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.snapshot_memory import SnapshotMemoryClient

if TYPE_CHECKING:
    import torch


class SnapshotReader:
    """Reads snapshots. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        group: WorkerProcessGroup,
        client: SnapshotMemoryClient,
        generators: Sequence[torch.Generator],
        say: Callable[[str], None],
    ) -> None:
        self._group = group
        self._client = client
        self._generators = generators
        self._say = say
        self.settle(group.topology.nodes)

    def settle(self, memories: tuple[tuple[int, ...], ...]) -> None:
        """Set the ranks that share each memory, and determine the position of this one."""
        self.memories = memories
        self.here = next(number for number, ranks in enumerate(memories) if self._group.rank in ranks)
        self.place = memories[self.here].index(self._group.rank)

    def newest(self) -> FoundSnapshot | None:
        """Return the newest snapshot that is complete and unchanged, on any node."""
        held = self.held()
        while True:
            found = newest(held)
            bad = self._bad(found) if found is not None else {}
            if found is None or not bad:
                return found
            self._tell(found, next(iter(bad.values())))
            held = [one for one in held if one.turn != found.turn or (one.node, one.rank) not in bad]

    def load(
        self, found: FoundSnapshot, kept: Mapping[str, object], between: Callable[[], Exchange]
    ) -> dict[str, Any] | None:
        """Restore in place; return the value saved as `extra`. None: it could not be read.

        `kept` may be some of the objects, if others are restored later.
        """
        parts = self._parts(found)
        whole = found.whole_for(self.here)
        first = parts[whole[0]]
        plain = first.plain or {}
        tables = [parts[rank].table("", 0) for rank in whole]
        targets = state.targets(kept, plain, loading.shapes(tables))
        needed = loading.needed(tables, targets)
        wanted = self._group.gather(needed, all=True) or []
        planned = transfers(found, wanted, self.memories)
        if planned and (problem := self._problem(partial(carry, between(), planned, self._client, check=True))):
            self._tell(found, problem)
            return None
        problem = self._problem(partial(self._read, found, [parts[rank] for rank in needed], targets))
        if problem:  # some objects have already changed, so the restore cannot be undone
            raise CheckpointError(f"the snapshot of step {found.step} cannot be read: {problem}")
        state.restore(kept, plain, targets)
        rank = self._group.rank
        others = [one.random for one in parts.values()]
        if rank in parts:
            randomness.restore([parts[rank].random], 0, self._generators)
        else:
            randomness.restore(others, len(others) + rank, self._generators)
        extra: dict[str, Any] = unpacked(first.extra, {})
        return extra

    def _problem(self, stage: Callable[[], None]) -> str:
        """Call `stage`; return the error of any rank."""
        problem = ""
        try:
            stage()
        except (LaunchError, CheckpointError, OSError) as error:
            problem = f"rank {self._group.rank}: {error}"
        return next(filter(None, self._group.gather(problem, all=True) or []), "")

    def _read(self, found: FoundSnapshot, parts: Sequence[Part], targets: Tensors) -> None:
        fds: list[int] = []
        try:
            tables = []
            for part in parts:
                fds.append(self._client.show(found.name(part.rank)))
                tables.append(part.table(str(fds[-1]), os.fstat(fds[-1]).st_size))
            contents = loading.Contents(Info(found.step, loading.DESCRIPTORS), Values(found.step, {}, {}), tables)
            loading.read(contents, targets)
        finally:
            for fd in fds:
                os.close(fd)

    def held(self) -> list[HeldPart]:
        """Return all parts; the first rank of each memory reads it."""
        mine = []
        for name in self._client.names() if not self.place else ():
            part = self._part(name) if not is_counter(name) else None
            if part is not None:
                turn = int(name.partition(".")[2])
                mine.append(HeldPart(self.here, part.rank, turn, part.step, part.era, part.together, part.sharded))
        gathered = self._group.gather(msgspec.json.encode(mine).decode(), all=True) or []
        return [one for text in gathered for one in msgspec.json.decode(text, type=list[HeldPart])]

    def _bad(self, found: FoundSnapshot) -> dict[tuple[int, int], str]:
        """Return node and rank of parts that were changed, with the reason. The ranks of a node share the work."""
        node = self.here
        here = [rank for rank, holders in found.holders.items() if node in holders]
        mine: list[Any] = []
        for rank in here[self.place :: len(self.memories[node])]:
            fd = self._client.show(found.name(rank))
            try:
                problems = differences(fd)
            finally:
                os.close(fd)
            if problems:
                mine.append([node, rank, f"the part of rank {rank}, on node {node}: {problems[0]}"])
        gathered = self._group.gather(mine, all=True) or []
        return {(where, rank): why for rows in gathered for where, rank, why in rows}

    def _parts(self, found: FoundSnapshot) -> dict[int, Part]:
        """Return the tables of all parts, on all ranks."""
        mine = []
        for rank, holders in found.holders.items():
            if not self.place and holders[0] == self.here:
                part = self._part(found.name(rank))
                mine += [msgspec.json.encode(part).decode()] if part is not None else []
        gathered = [text for texts in self._group.gather(mine, all=True) or [] for text in texts]
        return {part.rank: part for part in (msgspec.json.decode(text, type=Part) for text in gathered)}

    def _part(self, name: str) -> Part | None:
        fd = self._client.show(name)
        try:
            return read(fd)
        finally:
            os.close(fd)

    def _tell(self, found: FoundSnapshot, why: str) -> None:
        if self._group.is_main:
            self._say(f"phalanx: the snapshot of step {found.step} is not used: {why}")


def carry(
    exchange: Exchange, planned: Sequence[Transfer], client: SnapshotMemoryClient, *, check: bool = False
) -> None:
    """Send parts from memory to memory. `check`: raise CheckpointError if one was changed."""
    for fd in exchange.carry(planned, client.show, client.lend):
        problems = differences(fd) if check else []
        os.close(fd)
        if problems:
            raise CheckpointError(problems[0])
