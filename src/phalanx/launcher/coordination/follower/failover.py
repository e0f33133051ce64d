"""The coordinator of a follower in an elastic run: it becomes the leader if node 0 is lost and it is next in line.

All nodes have the peer list. The first live node on it takes over and opens the port that it reserved at the start, and
the others join it. The list has the addresses of the first 64 nodes, so one of them must be alive. To prevent
split-brain, a node continues only with most of the nodes that may still run: see quorum.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from phalanx.contract.messages import worker_messages
from phalanx.contract.ranks import number_ranges
from phalanx.contract.ranks.placement import MAX_NODES
from phalanx.control.endpoint import CONNECT_TIMEOUT, STEADILY, Endpoint, probe
from phalanx.control.messages import Peer, PeerList, RpcFrame
from phalanx.errors import JoinError, PhalanxError
from phalanx.launcher.actions import Action, StartAttempt
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.coordinator import AgentProxy, AgentView, AttemptReport, RunResult
from phalanx.launcher.coordination.follower.coordinator import FollowerCoordinator
from phalanx.launcher.coordination.leader.coordinator import LeaderCoordinator, TakeoverState
from phalanx.launcher.coordination.quorum import Electorate
from phalanx.launcher.ipc.node_links import NodeLinks
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.workers.worker import WorkerFailure

_RETRY_INTERVAL = 0.5  # seconds


async def find_next_leader(
    follower: FollowerCoordinator, why: str, *, silent: bool, timeout: float, note: Callable[[str], None]
) -> TakeoverState | None:
    """Join the next leader. If this node is the next one, return the state it needs to lead.

    `why` the leader is lost. `silent`: it may still be alive. `timeout`: seconds to join another leader.
    """
    peers = follower.orders.peer_list
    if peers is None:
        follower.orders.give_up(why)
        return None
    note(f"node {peers.leader} is lost: {why}")
    ended = {peers.leader} if await _has_ended(follower, peers, silent=silent, note=note) else set[int]()
    until = time.monotonic() + timeout
    while True:
        found = await _join_next(follower, peers, ended, timeout)
        if isinstance(found, Peer):
            note(f"node {found.member} ({found.host}) leads now")
            return None
        if not found or not follower.state.running:  # there is no state to continue from
            follower.orders.give_up(why)
            return None
        state = _takeover_state(follower, peers, why, frozenset(ended))
        if state.electorate.elects(state.others.keys() | {follower.state.member}):
            return state
        before = [peer.member for peer in peers.successors if peer.member < follower.state.member]
        if time.monotonic() >= until or ended.issuperset(before):
            follower.orders.give_up(f"{why}; {state.electorate.missing({follower.state.member})}")
            return None
        await asyncio.sleep(_RETRY_INTERVAL)  # the link to one of them may recover


async def _has_ended(
    follower: FollowerCoordinator, peers: PeerList, *, silent: bool, note: Callable[[str], None]
) -> bool:
    """Return whether the lost leader is known to have ended."""
    endpoint = follower.links.member.leader_endpoint
    if silent or endpoint is None:
        return False
    found = await probe(endpoint, steadily=STEADILY)
    if found == "listens":
        note(f"node {peers.leader} still answers: it has dropped this node")
    return found == "closed"


async def _join_next(
    follower: FollowerCoordinator, peers: PeerList, ended: set[int], timeout: float
) -> Peer | Literal["own", ""]:
    """Join the first peer that leads, and return it. "own": this node is the next; empty: it is not a peer.

    Peers that are known to have ended are added to `ended`.
    """
    for peer in peers.successors:
        if peer.member == follower.state.member:
            return "own"
        endpoint = Endpoint(peer.address, peer.port)
        found = await probe(endpoint)
        if found == "listens":
            try:
                await follower.links.follow(endpoint, follower.state, timeout)
            except JoinError:  # it has ended, or still has its leader: then this node is disconnected
                found = await probe(endpoint)
            else:
                return peer
        if found == "closed":
            ended.add(peer.member)
    return ""


def _takeover_state(follower: FollowerCoordinator, peers: PeerList, why: str, ended: frozenset[int]) -> TakeoverState:
    state = follower.state
    worked, spares = (number_ranges.decode(each, MAX_NODES) for each in (peers.working, peers.spares))
    addresses = {peer.member: Endpoint(peer.address, peer.port) for peer in peers.successors}
    order = list(dict.fromkeys([peers.leader, *addresses, *sorted(worked | spares)]))
    return TakeoverState(
        leader=peers.leader,
        why=why,
        attempt=state.ordered,
        generation=state.generation,
        readiness=state.readiness,
        worked=worked,
        others={member: addresses.get(member) for member in order if member > state.member},
        electorate=Electorate(tuple(order), ended),
    )


class RoleLinks:
    """The links of the current role of a node, which may change: see `NodeLinks`."""

    def __init__(self, current: Callable[[], NodeLinks]) -> None:
        self._current = current

    @property
    def leads(self) -> bool:
        """Return whether this node leads now."""
        return self._current().leads

    @property
    def skew(self) -> float:
        """Return the clock of this node minus the leader's, in seconds."""
        return self._current().skew

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each follower. Empty until this node leads."""
        return self._current().members()

    def send_rpc(self, frame: RpcFrame, to: int | None) -> None:
        """Send a frame in the current role."""
        self._current().send_rpc(frame, to)

    def backlog(self, to: int | None) -> int:
        """Return the bytes that another node has not received yet."""
        return self._current().backlog(to)

    def address(self, member: int) -> str:
        """Return the address of a member. Empty until this node leads."""
        return self._current().address(member)

    def on_trial(self) -> frozenset[int]:
        """Return the ranks of nodes on trial, if this node leads."""
        return self._current().on_trial()

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:
        """Continue without a node, if this node leads."""
        return self._current().dismiss(ranks, why)


class FailoverCoordinator:
    """A coordinator that follows at first, and may lead later. It delegates to its current role."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._agent = AgentProxy()
        self._follower = FollowerCoordinator(context, leader_lost=self._leader_lost)
        self._role: FollowerCoordinator | LeaderCoordinator = self._follower
        self._takeover: asyncio.Task[None] | None = None
        self.links = RoleLinks(lambda: self._role.links)

    # -- replacing the leader

    def _leader_lost(self, why: str, silent: bool) -> None:
        before = self._takeover  # the next leader may be lost too, right after this node joined it
        self._takeover = asyncio.get_running_loop().create_task(self._replace_leader(why, before, silent=silent))

    async def _replace_leader(self, why: str, before: asyncio.Task[None] | None, *, silent: bool) -> None:
        """Join the next leader, or become it."""
        if before is not None:
            await before
        if self._role is not self._follower:
            return
        # Some nodes detect the loss of the leader later.
        timeout = self._context.rendezvous.timeouts.node + CONNECT_TIMEOUT
        state = await find_next_leader(self._follower, why, silent=silent, timeout=timeout, note=self._agent.note)
        if state is not None:
            await self._lead(state, timeout)

    async def _lead(self, state: TakeoverState, timeout: float) -> None:
        follower = self._follower
        location = replace(self._context.rendezvous.location, file=None)
        rendezvous = replace(self._context.rendezvous, member=follower.state.member, leads=True, location=location)
        plan = replace(self._context.plan, rendezvous=rendezvous)
        leader = LeaderCoordinator(replace(self._context, plan=plan, rendezvous=rendezvous))
        leader.attach(self._agent)
        follower.log_forwarder = None
        self._role = leader
        # In the background: a silent leader does not answer.
        dropping = asyncio.get_running_loop().create_task(follower.links.member.drop())
        try:
            await leader.take_over(state, timeout)
        except (OSError, PhalanxError) as error:
            leader.fail(f"node {state.leader} is lost, and this node cannot take its place: {error}")
        await dropping

    # -- delegated to the current role

    @property
    def log_forwarder(self) -> LogForwarder | None:
        """Return the log forwarder of the current role."""
        return self._role.log_forwarder

    def attach(self, agent: AgentView) -> None:
        """Set the agent of this coordinator and its role."""
        self._agent.attach(agent)
        self._role.attach(agent)

    async def join(self) -> None:
        """Join the leader."""
        await self._role.join()

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Return the first attempt of the current role."""
        return await self._role.first_attempt()

    async def wait_for_others(self) -> None:
        """Wait until the leader is known, then wait in that role."""
        if self._takeover is not None:
            await self._takeover
        await self._role.wait_for_others()

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return the answer of the current role."""
        return self._role.is_last_attempt(failed=failed)

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Wait until the leader is known, then report to it."""
        if self._takeover is not None:
            await self._takeover
        return await self._role.attempt_ended(report)

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Pass the decision to the current role."""
        return self._role.worker_failed(failure)

    def regroup_ready(self, connected: bool, finished: bool, all_connected: bool) -> None:
        """Report to the current role."""
        self._role.regroup_ready(connected, finished, all_connected)

    def rank_left(self) -> None:
        """Report to the current role."""
        self._role.rank_left()

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Report to the current role."""
        self._role.first_step(message)

    def batch_skipped(self, message: worker_messages.SkippedBatch) -> None:
        """Report to the current role."""
        self._role.batch_skipped(message)

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        """Pass the message to the current role."""
        self._role.halt_message(rank, message)

    def preempt(self, number: signal.Signals) -> bool:
        """Begin a preemption in the current role."""
        return self._role.preempt(number)

    def signal_received(self, number: signal.Signals) -> None:
        """Report to the current role."""
        self._role.signal_received(number)

    def forward_signal(self, number: signal.Signals) -> None:
        """Forward in the current role."""
        self._role.forward_signal(number)

    def announce_result(self, code: int, text: str) -> None:
        """Announce in the current role."""
        self._role.announce_result(code, text)

    async def close(self, code: int, text: str) -> None:
        """Cancel a takeover, and close the current role and the reserved port."""
        if self._takeover is not None:
            self._takeover.cancel()
        await self._role.close(code, text)
        for sock in self._context.sockets:
            sock.close()
