"""Gathers the evidence about a stall from all nodes. A node that does not answer is evidence as well."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from phalanx.contract import encoding
from phalanx.contract.encoding import Decoder
from phalanx.control.member import join_problems
from phalanx.diagnose.evidence import Evidence, NodeFacts
from phalanx.launcher.hangs import node_evidence
from phalanx.launcher.hangs.cluster_progress import ClusterProgress
from phalanx.launcher.hangs.node_evidence import NodeEvidence
from phalanx.launcher.telemetry import out_of_memory, process_stats
from phalanx.launcher.telemetry.process_stats import ProcessStatsReader

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchContext

NODE_TIMEOUT = 2.2  # seconds for another node to send its evidence
_PEER_TIMEOUT = 1.5  # seconds for one node to reach another: the first packet is retransmitted after one second
_MOST_PEERS = 64  # number of peers that a node tries to reach
_REACH_TIMEOUT = 0.7  # seconds for a host to answer at all


class ReachableNode(msgspec.Struct, frozen=True, array_like=True):
    """A node that others should be able to reach: its first rank, and its address as node 0 sees it."""

    rank: int
    address: Annotated[str, msgspec.Meta(max_length=256)]


_peers: Decoder[list[ReachableNode]] = Decoder(list[ReachableNode])


def peers_to_reach(peers: Sequence[ReachableNode], most: int = _MOST_PEERS) -> Iterator[Sequence[ReachableNode]]:
    """Yield for each peer those that it tries to reach: all, or in a larger run the next ones in a ring."""
    if len(peers) <= most:
        yield from [peers] * len(peers)
        return
    ring = [*peers, *peers[:most]]
    for at in range(len(peers)):
        yield ring[at + 1 : at + 1 + most]


class EvidenceGatherer:
    """Gathers the evidence of this node, and on the leader that of all nodes."""

    def __init__(self, context: WatchContext, progress: ClusterProgress, stats: ProcessStatsReader) -> None:
        self._agent = context.agent
        self._links = context.links
        self._rpc = context.rpc
        self._progress = progress
        self._stats = stats
        self._kills = out_of_memory.read()
        self._taking = asyncio.Lock()  # all stacks of a worker are written into one file
        context.rpc.serve("evidence", self._answer)

    async def gather(self) -> Evidence:
        """Return the evidence of all nodes."""
        plan = self._agent.plan
        members = {member: ranks for member, ranks in self._links.members().items() if ranks}
        loop = asyncio.get_running_loop()
        peers = [ReachableNode(ranks[0], self._links.address(member)) for member, ranks in members.items()]
        replies = {
            member: loop.create_task(
                self._rpc.request("evidence", encoding.encode(asked), to=member, timeout=node_evidence.LONGEST)
            )
            for member, asked in zip(members, peers_to_reach(peers), strict=True)
        }
        own = asyncio.create_task(self._take())
        try:
            await self._wait_for(replies)
            found = [await own]
            for member, reply in replies.items():
                found.append(await self._evidence_of(member, members[member], reply))
        finally:
            for reply in replies.values():
                reply.cancel()
        ranks, tracker = [rank for each in found for rank in each.ranks], self._progress.tracker
        if tracker is not None:
            ranks = list(map(tracker.complete, ranks))
        return Evidence(
            time=time.time(),
            waited=round(tracker.waited, 1) if tracker is not None else 0.0,
            ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
            nodes=tuple(each.node for each in found),
            world_size=plan.group.world_size,
            limit=plan.hang.stall_timeout or 30.0,
        )

    async def _wait_for(self, replies: dict[int, asyncio.Task[bytes]]) -> None:
        if not replies:
            return
        await asyncio.wait(replies.values(), timeout=NODE_TIMEOUT)
        # A node that still sends heartbeats may need longer, because its own ranks do not answer.
        recent = time.monotonic() - self._progress.quiet
        slow = [
            reply
            for member, reply in replies.items()
            if not reply.done() and self._progress.last_heartbeat(member)[0] > recent
        ]
        if slow:
            await asyncio.wait(slow, timeout=node_evidence.LONGEST - NODE_TIMEOUT)

    async def _evidence_of(self, member: int, ranks: tuple[int, ...], reply: asyncio.Task[bytes]) -> NodeEvidence:
        """Return the evidence that a node sent, or what is known about it otherwise."""
        if reply.done():
            with contextlib.suppress(TimeoutError, msgspec.DecodeError):
                return node_evidence.decode(reply.result())
        tracker = self._progress.tracker
        then, heartbeat = self._progress.last_heartbeat(member)
        began = tracker.began if tracker is not None else time.monotonic() - NODE_TIMEOUT
        silent = time.monotonic() - (then if heartbeat is not None else began)
        node = NodeFacts(
            node=heartbeat.node if heartbeat is not None else member,
            host=heartbeat.host if heartbeat is not None else "",
            silent=silent,
            lost=member not in self._links.members(),
            finding=await self._route(member),
        )
        return node_evidence.of_silent_node(node, ranks, f"its node has not answered for {silent:.0f} s")

    async def _route(self, member: int) -> str:
        """Return the problem with the route to a member, if any."""
        address = self._links.address(member)
        return await join_problems.way(address, timeout=_REACH_TIMEOUT) if address else ""

    async def _answer(self, _: int | None, content: bytes) -> bytes:
        peers = _peers.decode(content)[:_MOST_PEERS]
        unreached = asyncio.gather(*map(self._unreached, peers))
        evidence = await self._take()
        found = tuple(rank for rank in await unreached if rank is not None)
        return node_evidence.encode(replace(evidence, node=replace(evidence.node, unreached=found)))

    async def _unreached(self, peer: ReachableNode) -> int | None:
        """Return the rank of a peer that this node cannot reach. None: it can."""
        own = peer.rank in {seat.rank for seat in self._agent.plan.seats}
        if own or not peer.address or await join_problems.reaches(peer.address, timeout=_PEER_TIMEOUT):
            return None
        return peer.rank

    async def _take(self) -> NodeEvidence:
        """Gather the evidence of this node."""
        total, available = process_stats.host_memory()
        node = NodeFacts(
            node=self._agent.plan.group.node_rank,
            host=os.uname().nodename,
            memory=total,
            available=available,
            swapping=round(self._stats.swapping(), 1),
            out_of_memory=out_of_memory.read().since(self._kills),
        )
        attempt = self._agent.attempt or self._progress.attempt
        if attempt is None:
            return NodeEvidence(node=node, ranks=())
        async with self._taking:
            evidence = await node_evidence.take(attempt, self._stats, node)
        return node_evidence.without_listing_all(evidence, self._agent.plan.group.world_size)
