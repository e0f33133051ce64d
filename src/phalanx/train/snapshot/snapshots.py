"""Snapshots: copies of the state in memory that the agent of each node holds. They outlive all workers of a node.

    snapshots = Snapshots(run, client)
    snapshots.save(step, kept, extra)          # returns after one copy in memory
    found = snapshots.newest()                 # of all nodes
    extra = snapshots.load(found, kept)

Every rank makes the same calls in the same order. There are two memories for each rank's part, written in turn: while
one is written, the other has the snapshot before. Without sharding the ranks of a node divide the state among them, so
that each node has all of it. With sharding each rank writes its own part, and the next node gets a copy, unless each
node has a replica. Shards are copied during the next forward and backward (`forward`, `update`).
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from phalanx.errors import LaunchError
from phalanx.train.checkpoint import randomness, state
from phalanx.train.checkpoint.buffer import Placed
from phalanx.train.checkpoint.checkpoints import lower_priority
from phalanx.train.checkpoint.plain import packed
from phalanx.train.checkpoint.shares import Chunk, share
from phalanx.train.model import shard_placement
from phalanx.train.snapshot.copying import ShardCopier
from phalanx.train.snapshot.counter import Counter, counter_name, reached, waited
from phalanx.train.snapshot.exchange import Exchange, Transfer
from phalanx.train.snapshot.found import RESCUE, Division, FoundSnapshot, division, newest
from phalanx.train.snapshot.part import Part, Writer
from phalanx.train.snapshot.reader import SnapshotReader, carry
from phalanx.worker.process_group.group import WorkerProcessGroup
from phalanx.worker.snapshot_memory import SnapshotMemoryClient

_SMALL = 1 << 20  # bytes whose checksums take less time than a switch to a thread


class Snapshots:
    """The snapshots of one run, as one rank writes and reads them."""

    def __init__(
        self,
        group: WorkerProcessGroup,
        client: SnapshotMemoryClient,
        *,
        generators: Sequence[torch.Generator] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._group = group
        self._nodes = group.topology.nodes
        self._local = group.topology.local_ranks
        self._others = len(self._nodes) > 1
        self._client = client
        self._generators = generators
        self.say = say if say is not None else _say
        self._reader = SnapshotReader(group, client, generators, self.say)
        names = [f"{group.rank}.{turn}" for turn in (0, 1)]
        self._writers = [Writer(partial(client.lend, name)) for name in names]
        self._counter = Counter(client, group.rank)
        begin = partial(_begin_thread, group.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot", initializer=begin)
        self._copying = ShardCopier(self._thread, shares_cores=group.device.type == "cpu")
        self._exchange: Exchange | None = None
        self._job: Future[None] | None = None
        self._writing = False  # the job writes a snapshot; else it allocates memory
        self._prepared = False
        self._waited = 0.0  # seconds for slower ranks, which the next forward would wait for otherwise
        self._again = 0  # the step at which a skipped snapshot is due again
        self._pause = 1  # steps
        self._era = ""
        self._turn = 0  # of the two memories, the one to write next
        self._looked = False  # the turn is known
        self._sharded = False
        self._divided: Division | None = None  # of shards
        self._chunks: dict[str, Chunk] = {}  # of shards, by name
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
        one before is not complete, or there is no memory."""
        began, waited = time.perf_counter(), self._waited
        try:
            return self._save(step, kept, extra)
        finally:
            self._copying.hold(time.perf_counter() - began - (self._waited - waited))

    def forward(self) -> None:
        """Start to copy shards, before the first forward of a step."""
        self._copying.forward()

    def update(self) -> None:
        """Wait for the copy of shards, before an update changes them."""
        self._copying.update()

    @property
    def held(self) -> float:
        """Seconds that the training thread has spent on all snapshots."""
        return self._copying.held

    @property
    def costs(self) -> Sequence[float]:
        """Seconds of training time per snapshot, for the latest ones."""
        return self._copying.costs

    @property
    def durations(self) -> Sequence[float]:
        """Seconds until a snapshot was complete, for the latest ones."""
        return self._copying.durations

    def _save(self, step: int, kept: Mapping[str, object], extra: Mapping[str, Any]) -> bool:
        if self.off:
            return False
        if not self._settled():
            self._again, self._pause = step + self._pause, self._pause * 2
            return False
        if not self._era:
            self._begin()
        found = state.taken(kept)
        sharded = self._sharded = any(isinstance(tensor, DTensor) for tensor in found.tensors.values())
        if sharded and self._divided is None:
            self._divided = division(shard_placement.replicas(kept), self._nodes, self._group.rank)
        divided = self._divided if sharded and self._divided is not None else Division(self._local)
        together, place = divided.together, divided.together.index(self._group.rank)
        chunks = share(
            found.tensors, place, len(together), frozenset(found.own), shards=divided.writes, known=self._chunks
        )
        if not self._prepared:
            self._prepared = True
            self._job = self._start(partial(self._prepare, chunks), chunks)
            if not self._settled():
                self._again, self._pause = step + 1, 2
                return False
        part = Part(
            step,
            self._era,
            self._group.rank,
            together,
            packed(dict(extra), "extra", {}),
            found.plain if place == 0 else None,
        )
        carried = None
        if sharded and self._others and not divided.whole_nodes:
            carried = partial(carry, self._between(), self._to_partners(), self._client)
        random = randomness.taken(self._generators)
        writer, small = self._writers[self._turn], _is_small(chunks)
        self._copying.begin()
        try:
            placed = writer.take(chunks, overlap=not small)
        except (LaunchError, OSError) as error:
            self._job = _done(partial(_raise, error))
            return False
        finish = partial(self._finish, writer, part, placed, random, carried)
        if any(chunk.sharded for chunk in chunks) and not small:
            self._job = self._copying.later(writer, finish)
        else:
            self._job = self._thread.submit(finish) if carried else self._start(finish, chunks)
        self._counter.begin(step)
        self._writing, self._pause = True, 1
        return True

    def wanted(self, step: int) -> bool:
        """Return whether a skipped snapshot is due at this step."""
        return step == self._again and not self.off

    def wait(self) -> None:
        """Wait until this rank has written its part of the current snapshot."""
        self._copying.forward()
        if self._job is not None:
            wait([self._job])

    def close(self, patience: float = 0.0) -> None:
        """Close; a snapshot that is not complete is dropped, and the one before is kept.

        `patience`: seconds to wait for one that is nearly complete, if no rank has the whole state.
        """
        self._hang_up()
        if patience and self._sharded:
            self._copying.forward()  # nothing changes the shards any more
        self._copying.drop()
        wait([self._job] if self._job is not None else [], patience if self._sharded else 0.0)
        for writer in self._writers:
            writer.abandoned = True
        self._thread.shutdown()
        for writer in self._writers:
            writer.close()
        self._counter.close()
        self._client.close()

    def _finish(
        self,
        writer: Writer,
        part: Part,
        placed: Sequence[Placed],
        random: dict[str, Any],
        carried: Callable[[], None] | None,
    ) -> None:
        writer.finish(msgspec.structs.replace(part, random=randomness.packed(random)), placed)
        if carried is not None:
            carried()

    def _prepare(self, chunks: Sequence[Chunk]) -> None:
        for turn in (self._turn, 1 - self._turn):
            self._writers[turn].prepare(chunks)

    def _start(self, call: Callable[[], None], chunks: Sequence[Chunk]) -> Future[None]:
        """Call in the thread, or at once if that is as fast."""
        return _done(call) if _is_small(chunks) else self._thread.submit(call)

    def _settled(self) -> bool:
        """Return whether the last snapshot is complete on all ranks: only then may the one before it be overwritten."""
        job = self._job
        if job is None:
            return True
        done = job.done()
        failure = _reason(job.exception()) if done else ""
        began = time.perf_counter()
        state_of_all = self._group.max({"busy": not done, "failed": bool(failure)})
        self._waited += time.perf_counter() - began
        if state_of_all["failed"]:
            reasons = self._group.gather(failure, all=True) or []
            self._turn_off(next(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why))
        if state_of_all["failed"] or state_of_all["busy"]:
            return False
        self._job = None
        if self._writing:
            self._writing = False
            self._copying.end()
            self._turn = 1 - self._turn
            if not self._cleared:
                self._cleared = True
                self._clear()
        return True

    def _begin(self) -> None:
        """Start the snapshots of this group: the newest of earlier ones must not be overwritten."""
        self._era = self._group.broadcast(secrets.token_hex(4))
        if not self._looked:
            found = newest(self._reader.held())
            self._turn = found.next_turn if found is not None else 0

    def _turn_off(self, why: str) -> None:
        self.off = True
        self._hang_up()  # no rank waits for one that has stopped
        self._copying.drop()
        for writer in self._writers:
            writer.abandoned = True
        if self._job is None or self._job.done():
            self._let_go()
        else:  # after the thread has stopped writing there; nothing waits for that
            self._thread.submit(self._let_go)
        if self._group.is_main:
            self.say(
                f"phalanx: training continues without snapshots in memory: {why}\n"
                "  fix: more memory; or --snapshot-every off, to silence this"
            )

    def _let_go(self) -> None:
        with contextlib.suppress(LaunchError):
            for turn, writer in enumerate(self._writers):
                if turn == self._turn or not writer.sealed:  # the other one may still be needed
                    writer.close()
                    self._client.drop(f"{self._group.rank}.{turn}")

    def _clear(self) -> None:
        """Drop parts of ranks that are on other nodes now."""
        if self._reader.place:
            return
        ranks = {*self._reader.memories[self._reader.here]}
        writers = {one.sender for one in self._to_partners() if one.receiver in ranks} | ranks
        used = {f"{rank}.{turn}" for rank in writers for turn in (0, 1)} | {*map(counter_name, ranks)}
        self._client.keep_only(used)

    # -- the next node

    def _between(self) -> Exchange:
        """Return the connections between nodes. All ranks make them together, at first use."""
        if self._exchange is None:
            self._exchange = Exchange(self._group.rank, self._group.membership.timeout)
        return self._exchange

    def _hang_up(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _to_partners(self) -> list[Transfer]:
        planned = []
        for node, ranks in enumerate(self._nodes):
            others = self._nodes[(node + 1) % len(self._nodes)]
            for place, rank in enumerate(ranks):
                planned.append(Transfer(f"{rank}.{self._turn}", rank, others[place % len(others)]))
        return planned

    # -- finding and loading

    def newest(self) -> FoundSnapshot | None:
        """Return the newest snapshot that is complete and unchanged, wherever its parts are."""
        return self._reader.newest()

    def load(self, found: FoundSnapshot, kept: Mapping[str, object]) -> dict[str, Any] | None:
        """Restore in place; return what was saved as `extra`. None: it could not be read."""
        extra = self._reader.load(found, kept, self._between)
        if extra is not None:
            self._turn, self._looked = found.next_turn, True
            if found.turn == RESCUE:  # it takes as much memory as the parts of all ranks together: replace it soon
                self._again = found.step + 1
        return extra


def _begin_thread(device: torch.device) -> None:
    lower_priority()
    if device.type == "cuda":  # else pinning would create a context on the first GPU, which belongs to another rank
        torch.cuda.set_device(device)


def _is_small(chunks: Sequence[Chunk]) -> bool:
    size = sum(chunk.part.nbytes for chunk in chunks)
    return size <= _SMALL and not any(chunk.part.is_cuda for chunk in chunks)


def _done(call: Callable[[], None]) -> Future[None]:
    """Call at once, and return a future as if a thread had done it."""
    job: Future[None] = Future()
    try:
        call()
        job.set_result(None)
    except Exception as error:  # `_settled` reports it
        job.set_exception(error)
    return job


def _reason(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _raise(error: Exception) -> None:
    raise error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
