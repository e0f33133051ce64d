"""snapshot_nodes.py: snapshots of ranks on several nodes, each with its own memory; nodes and ranks leave and join.

Prints a line for each part that succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # here, and not in every rank
import torch.distributed.fsdp
from torch import nn

import phalanx
from phalanx.launcher.agent import snapshot_memory
from phalanx.train.snapshot.snapshots import Snapshots
from phalanx.worker.rendezvous import roll_call
from phalanx.worker.rendezvous.topology import Topology
from phalanx.worker.snapshot_memory import SnapshotMemoryClient

Nodes = tuple[tuple[int, ...], ...]
State = dict[str, list[float]]
MIB = 1 << 20


@contextlib.contextmanager
def memories(*rooms: int) -> Iterator[list[str]]:
    """In a separate process, like those of an agent; each with a limited size."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:

        async def serve() -> None:
            made = [
                snapshot_memory.SnapshotMemory(lambda pid: True, requested=True, room=lambda room=room: room)
                for room in rooms
            ]  # type: ignore[misc]
            os.write(writing, " ".join(one.name for one in made).encode())
            os.close(writing)
            await asyncio.Event().wait()

        asyncio.run(serve())
    os.close(writing)
    try:
        yield os.read(reading, 1 << 16).decode().split()
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Rank:
    def __init__(self, nodes: Nodes, names: list[str], how: str) -> None:
        self.run = phalanx.Run(phalanx.init())
        membership, topology = self.run.group.membership, Topology(nodes, self.run.rank)
        placement = roll_call.placement(membership.participants, topology)
        self.run.group.membership = dataclasses.replace(membership, topology=topology, placement=placement)
        self.messages: list[str] = []
        each = len(names) > len(nodes)  # a memory per rank, not per node
        self.memory = SnapshotMemoryClient(names[self.run.rank if each else self.run.group.node_rank])
        self.snapshots = Snapshots(self.run.group, self.memory, say=self.messages.append)
        if each:
            self.snapshots.held_in(names)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 1))
        self.net = self.run.wrap(self.model, how)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.kept = {"model": self.model, "opt": self.opt}

    def step(self, number: int) -> State:
        self.net(torch.full((2, 6), float(number))).square().mean().backward()
        self.opt.step()
        self.opt.zero_grad()
        assert self.snapshots.save(number, self.kept, {"epoch": number})
        self.snapshots.wait()
        return self.state()

    def state(self) -> State:
        found = {**self.model.state_dict()}
        for name, parameter in self.model.named_parameters():
            found[f"{name} average"] = self.opt.state[parameter]["exp_avg"]
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()
            for name, value in found.items()
        }

    def restored(self) -> tuple[int, int, State]:
        found = self.snapshots.newest()
        assert found is not None
        extra = self.snapshots.load(found, self.kept)
        assert extra is not None
        return found.step, extra["epoch"], self.state()

    def close(self) -> None:
        with mock.patch(
            "phalanx.worker.process_group.nccl.abort", side_effect=AssertionError
        ):  # the groups of the training stay open
            self.snapshots.close()
        self.run.group.close()


def run_ranks(nodes: Nodes, names: list[str], how: str, act: Callable[[Rank], Any]) -> list[Any]:
    def body() -> Any:
        torch.set_num_threads(1)
        rank = Rank(nodes, names, how)
        try:
            return act(rank)
        finally:
            rank.close()

    return phalanx.spawn(body, ranks=sum(map(len, nodes)), timeout=240)


def main() -> None:
    three: Nodes = ((0, 1), (2,))
    with memories(MIB, MIB, MIB) as names:
        before = run_ranks(three, names[:2], "fsdp", lambda rank: [rank.step(number) for number in (1, 2, 3)])
        assert before[0] == before[1] == before[2]
        # Node 1 is lost, and node 0 has a copy of rank 2's part. Two ranks continue, one of them on a new node.
        left = [names[0], names[2]]
        after = run_ranks(((0,), (1,)), left, "fsdp", Rank.restored)
        assert after == [(3, 3, before[0][2])] * 2, after
        print("a lost node's part is with its neighbour", flush=True)

        # The same memory works with DDP, because shards are identified by their position in the whole.
        assert run_ranks(((0,),), left[:1], "ddp", Rank.restored) == [(3, 3, before[0][2])]
        print("another number of ranks, and no shards", flush=True)

        def spoil(rank: Rank) -> Any:
            newest = rank.snapshots.newest()
            assert newest is not None
            fd = rank.memory.show(newest.name(1))
            byte = os.pread(fd, 1, 200)
            os.pwrite(fd, bytes([byte[0] ^ 1]), 200)
            os.close(fd)
            return *rank.restored(), rank.messages

        (found,) = run_ranks(((0,),), left[:1], "fsdp", spoil)
        assert found[:3] == (2, 2, before[0][1]), found
        assert "the snapshot of step 3 is not used: the part of rank 1, on node 0" in found[3][0], found[3]
        print("a flipped byte is noticed", flush=True)

    with memories(MIB, MIB) as names:
        before = run_ranks(three, names, "ddp", lambda rank: [rank.step(number) for number in (1, 2)])
        for node, nodes in ((0, ((0,),)), (1, ((0, 1),))):
            after = run_ranks(nodes, names[node : node + 1], "ddp", Rank.restored)
            assert after == [(2, 2, before[0][1])] * len(nodes[0]), after
        print("without shards each node has all", flush=True)

    with memories(MIB, MIB) as names:
        before = run_ranks(((0, 1),), names, "fsdp", lambda rank: [rank.step(number) for number in (1, 2)])
        after = run_ranks(((0, 1),), names, "fsdp", Rank.restored)
        assert after == [(2, 2, before[0][1])] * 2, after
        print("an agent for each rank", flush=True)

    def crowded(rank: Rank) -> Any:
        kept = {**rank.kept, "more": nn.Linear(100, 100)}
        saved = [rank.snapshots.save(number, kept, {}) for number in (1, 2, 3)]
        return saved, rank.snapshots.off, rank.messages, rank.snapshots.newest()

    with memories(9200) as names:
        found = run_ranks(((0, 1),), names, "ddp", crowded)
        assert [one[1] for one in found] == [True, True], found
        assert not any(found[0][0])
        assert "continues without snapshots in memory: rank" in found[0][2][0], found
        assert len(found[0][2]) == 1
        assert not found[1][2]
        print("no room is reported once", flush=True)


if __name__ == "__main__":
    main()
