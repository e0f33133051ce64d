"""Snapshots: copies of the state in memory that the agent of each node holds. They outlive all workers of a node.

    snapshots = Snapshots(run, client)
    snapshots.save(step, kept, extra)          # returns after one copy in memory
    found = snapshots.newest()                 # of all nodes
    extra = snapshots.load(found, kept)

Every rank makes the same calls in the same order. There are two memories for each rank's part, written in turn: while
one is written, the other has the previous snapshot. Without sharding the ranks of a node divide the state, so that each
node has all of it. With sharding each rank writes its own part, and the next node gets a copy, unless each node has a
replica. Shards are copied during the next forward and backward (`forward`, `update`).
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from phalanx.train.checkpoint import state
from phalanx.train.checkpoint.format.plain import packed
from phalanx.train.snapshot.counter import Counter, counter_name, reached, waited
from phalanx.train.snapshot.found import RESCUE, FoundSnapshot, newest
from phalanx.train.snapshot.part import Part
from phalanx.train.snapshot.partners import PartnerNodes
from phalanx.train.snapshot.reader import SnapshotReader
from phalanx.train.snapshot.state_division import StateDivision
from phalanx.train.snapshot.writer import SnapshotWriter
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.snapshot_memory import SnapshotMemoryClient


class Snapshots:
    """The snapshots of one run, written and read by one rank."""

    def __init__(
        self,
        group: WorkerProcessGroup,
        client: SnapshotMemoryClient,
        *,
        generators: Sequence[torch.Generator] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._group = group
        self._client = client
        self.say = say if say is not None else _say
        self._reader = SnapshotReader(group, client, generators, self.say)
        self._counter = Counter(client, group.rank)
        self._writer = SnapshotWriter(client, group.rank, group.device, generators)
        self._division = StateDivision(group.rank, group.topology.local_ranks, group.topology.nodes)
        self._partners = PartnerNodes(group, client)
        self._retry = Retry()
        self._waited = 0.0  # seconds for slower ranks, which the next forward would otherwise wait for
        self._era = ""
        self._looked = False  # it is known which memory to write first
        self._cleared = False
        self.off = False

    def held_in(self, memories: Sequence[str]) -> None:
        """Set the memory of each rank. Usually there is one per node, but a scheduler may start an agent per rank."""
        shared: dict[str, list[int]] = {}
        for rank, name in enumerate(memories):
            shared.setdefault(name, []).append(rank)
        self._reader.settle(tuple(map(tuple, shared.values())))

    # -- steps

    def committed(self, step: int) -> None:
        """Record a committed step, so that the next group knows how many steps it repeats."""
        self._counter.set(step)

    def reached(self) -> int:
        """Return the newest step that any rank of this node has committed."""
        return 0 if self._reader.place else reached(self._client)

    def waited(self) -> float:
        """Return the seconds since the last snapshot. If each group started at zero, frequent failures would prevent
        snapshots."""
        return 0.0 if self._reader.place else waited(self._client)

    # -- saving

    def save(self, step: int, kept: Mapping[str, object], extra: Mapping[str, Any]) -> bool:
        """Copy the state; shards are copied from the next `forward` on. Return False if the snapshot was skipped: the
        previous one is not complete, or there is no memory.
        """
        began, waited = time.perf_counter(), self._waited
        try:
            return self._save(step, kept, extra)
        finally:
            self._writer.copier.hold(time.perf_counter() - began - (self._waited - waited))

    def forward(self) -> None:
        """Start to copy shards, before the first forward of a step."""
        self._writer.copier.forward()

    def update(self) -> None:
        """Wait for the copy of shards, before an update changes them."""
        self._writer.copier.update()

    @property
    def held(self) -> float:
        """Total seconds that the training thread has spent on snapshots."""
        return self._writer.copier.held

    @property
    def costs(self) -> Sequence[float]:
        """Seconds of training time per snapshot, for the latest ones."""
        return self._writer.copier.costs

    @property
    def durations(self) -> Sequence[float]:
        """Seconds until a snapshot was complete, for the latest ones."""
        return self._writer.copier.durations

    def _save(self, step: int, kept: Mapping[str, object], extra: Mapping[str, Any]) -> bool:
        if self.off:
            return False
        if not self._settled():
            self._retry.later(step)
            return False
        if not self._era:
            self._begin()
        found = state.taken(kept)
        divided, chunks = self._division.divide(kept, found)
        if self._writer.prepare(chunks) and not self._settled():
            self._retry.next_step(step)
            return False
        rank, together = self._group.rank, divided.together
        plain = found.plain if rank == together[0] else None
        part = Part(
            step, self._era, rank, together, packed(dict(extra), "extra", {}), plain, sharded=tuple(found.sharded)
        )
        carried = None
        if self._division.sharded and self._partners.exist and not divided.whole_nodes:
            carried = self._partners.copies(self._writer.turn)
        if not self._writer.write(part, chunks, carried):
            return False
        self._counter.begin(step)
        self._retry.reset()
        return True

    def wanted(self, step: int) -> bool:
        """Return whether a skipped snapshot is due at this step."""
        return step == self._retry.step and not self.off

    def wait(self) -> None:
        """Wait until this rank has written its part of the current snapshot."""
        self._writer.wait()

    def close(self, patience: float = 0.0) -> None:
        """Close. An incomplete snapshot is dropped, and the previous one is kept.

        `patience`: seconds to wait for a nearly complete one, if no rank has the whole state.
        """
        self._partners.close()
        self._writer.close(patience if self._division.sharded else 0.0)
        self._counter.close()
        self._client.close()

    def _settled(self) -> bool:
        """Return whether the last snapshot is complete on all ranks: only then the previous one may be overwritten."""
        if not self._writer.started:
            return True
        done = self._writer.done
        failure = self._writer.failure if done else ""
        began = time.perf_counter()
        state_of_all = self._group.max({"busy": not done, "failed": bool(failure)})
        self._waited += time.perf_counter() - began
        if state_of_all["failed"]:
            reasons = self._group.gather(failure, all=True) or []
            self._turn_off(next(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why))
        if state_of_all["failed"] or state_of_all["busy"]:
            return False
        if self._writer.end() and not self._cleared:
            self._cleared = True
            self._clear()
        return True

    def _begin(self) -> None:
        """Start the snapshots of this group: the newest of earlier ones must not be overwritten."""
        self._era = self._group.broadcast(secrets.token_hex(4))
        if not self._looked:
            found = newest(self._reader.held())
            self._writer.turn = found.next_turn if found is not None else 0

    def _turn_off(self, why: str) -> None:
        self.off = True
        self._partners.close()
        self._writer.give_up()
        if self._group.is_main:
            self.say(
                f"phalanx: training continues without snapshots in memory: {why}\n"
                "  fix: more memory; or --snapshot-every off, to silence this"
            )

    def _clear(self) -> None:
        """Drop parts of ranks that are now on other nodes."""
        if self._reader.place:
            return
        ranks = {*self._reader.memories[self._reader.here]}
        writers = {one.sender for one in self._partners.transfers(0) if one.receiver in ranks} | ranks
        used = {f"{rank}.{turn}" for rank in writers for turn in (0, 1)} | {*map(counter_name, ranks)}
        self._client.keep_only(used)

    # -- finding and loading

    def newest(self) -> FoundSnapshot | None:
        """Return the newest snapshot that is complete and unchanged, on any node."""
        return self._reader.newest()

    def load(self, found: FoundSnapshot, kept: Mapping[str, object]) -> dict[str, Any] | None:
        """Restore in place; return the value saved as `extra`. None: it could not be read.

        `kept` may be some of the objects, if others are restored later.
        """
        extra = self._reader.load(found, kept, self._partners.connect)
        if extra is not None:
            self._writer.turn, self._looked = found.next_turn, True
            if found.turn == RESCUE:  # it needs as much memory as the parts of all ranks together: replace it soon
                self._retry.step = found.step + 1
        return extra


class Retry:
    """When a skipped snapshot is due again: after one step, then two, then four."""

    def __init__(self) -> None:
        self.step = 0
        self._pause = 1  # steps

    def later(self, step: int) -> None:
        """Record that the snapshot of this step was skipped: wait twice as long as before."""
        self.step, self._pause = step + self._pause, self._pause * 2

    def next_step(self, step: int) -> None:
        """Record that the snapshot of this step was skipped for the first time."""
        self.step, self._pause = step + 1, 2

    def reset(self) -> None:
        """Record that a snapshot was taken."""
        self._pause = 1


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
