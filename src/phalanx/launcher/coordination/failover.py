"""The coordinator of a follower in an elastic run: it takes the lead if node 0 is lost and it is next in line.

All nodes have the peer list. The first living node on it takes over, opens the port that it reserved at the start, and
the others join it. To prevent split-brain, a leader that is only silent is replaced only by a majority of the nodes: it
may still run on the other side of a broken link.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

from phalanx.contract import worker_messages
from phalanx.control.member import CONNECT_TIMEOUT, STEADILY, Endpoint, answers
from phalanx.control.messages import PeerList, RpcFrame
from phalanx.errors import JoinError, PhalanxError
from phalanx.launcher.agent.worker import WorkerFailure
from phalanx.launcher.coordination.actions import Action
from phalanx.launcher.coordination.coordinator import AgentView, AttemptReport, RunResult, StartAttempt
from phalanx.launcher.coordination.follower import FollowerCoordinator
from phalanx.launcher.coordination.leader import LeaderCoordinator, TakeoverState
from phalanx.launcher.coordination.rendezvous_config import RendezvousConfig
from phalanx.launcher.output.console import Console
from phalanx.launcher.output.log_forwarder import LogForwarder
from phalanx.launcher.plan import Plan
from phalanx.launcher.runs.run_folder import RunFolder


class FailoverCoordinator:
    """A coordinator that follows at first, and may lead later. It delegates to its current role."""

    def __init__(
        self,
        plan: Plan,
        rendezvous: RendezvousConfig,
        folder: RunFolder,
        console: Console,
        sockets: Sequence[socket.socket],
    ) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._folder = folder
        self._console = console
        self._sockets = sockets
        self._follower = FollowerCoordinator(plan, rendezvous, folder, console, port=int(sockets[0].getsockname()[1]))
        self._follower.failover = self
        self._role: FollowerCoordinator | LeaderCoordinator = self._follower
        self._agent: AgentView | None = None
        self._takeover: asyncio.Task[None] | None = None

    # -- replacing the leader

    def leader_lost(self, why: str, *, silent: bool) -> None:
        """Join the next leader, or become it. `silent`: the leader may still be alive."""
        before = self._takeover  # the next leader may be lost too, right after this node joined it
        self._takeover = asyncio.get_running_loop().create_task(self._replace_leader(why, before, silent=silent))

    async def _replace_leader(self, why: str, before: asyncio.Task[None] | None, *, silent: bool) -> None:
        if before is not None:
            await before
        follower = self._follower
        if self._role is not follower:
            return
        peers = follower.peer_list
        if peers is None:
            follower.give_up(why)
            return
        self._note(f"node {peers.leader} is lost: {why}")
        endpoint = follower.leader_endpoint
        if not silent and endpoint is not None and await answers(endpoint, steadily=STEADILY):
            silent = True
            self._note(f"node {peers.leader} still answers: it has dropped this node")
        for peer in peers.peers:
            if peer.member == follower.id:
                if not follower.running:  # there is no state to continue from
                    break
                await self._lead(why, peers, silent=silent)
                return
            if await answers(Endpoint(peer.address, peer.port)):
                try:
                    await follower.follow(Endpoint(peer.address, peer.port), self._patience)
                except JoinError:
                    continue  # it is gone too, or still has its leader: this node is cut off
                self._note(f"node {peer.member} ({peer.host}) leads now")
                return
        follower.give_up(why)

    async def _lead(self, why: str, peers: PeerList, *, silent: bool) -> None:
        follower = self._follower
        size = len(peers.peers) + 1
        others = frozenset(peer.member for peer in peers.peers if peer.member > follower.id)
        rendezvous = replace(self._rendezvous, member=follower.id, leads=True, leader_file=None)
        leader = LeaderCoordinator(
            replace(self._plan, rendezvous=rendezvous), rendezvous, self._folder, self._console, self._sockets
        )
        if self._agent is not None:
            leader.attach(self._agent)
        follower.log_forwarder = None
        self._role = leader
        # In the background: a silent leader does not answer.
        dropping = asyncio.get_running_loop().create_task(follower.drop())
        state = TakeoverState(
            leader=peers.leader,
            why=why,
            size=size,
            attempt=follower.ordered,
            generation=follower.generation,
            readiness=follower.readiness,
            worked=frozenset(peer.member for peer in peers.peers if peer.works),
            others=others,
            quorum=size // 2 + 1 if silent else 1,
        )
        try:
            await leader.take_over(state, self._patience)
        except (OSError, PhalanxError) as error:
            leader.fail(f"node {peers.leader} is lost, and this node cannot take its place: {error}")
        await dropping

    @property
    def _patience(self) -> float:
        """Return how long to wait for others: some notice later that the leader is gone."""
        return self._rendezvous.node_timeout + CONNECT_TIMEOUT

    def _note(self, text: str) -> None:
        if self._agent is not None:
            self._agent.note(text)

    # -- delegated to the current role

    @property
    def log_forwarder(self) -> LogForwarder | None:
        """Return the log forwarder of the current role."""
        return self._role.log_forwarder

    @property
    def leads(self) -> bool:
        """Return whether this node leads now."""
        return self._role.leads

    @property
    def skew(self) -> float:
        """Return the clock of this node minus the leader's, in seconds."""
        return self._role.skew

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each follower. Empty until this node leads."""
        return self._role.members()

    def send_rpc(self, frame: RpcFrame, to: int | None) -> None:
        """Send a frame in the current role."""
        self._role.send_rpc(frame, to)

    def address(self, member: int) -> str:
        """Return the address of a member. Empty until this node leads."""
        return self._role.address(member)

    def attach(self, agent: AgentView) -> None:
        """Set the agent of this coordinator and its role."""
        self._agent = agent
        self._role.attach(agent)

    async def join(self) -> None:
        """Join the leader."""
        await self._role.join()

    async def first_attempt(self) -> StartAttempt | RunResult:
        """Return the first attempt of the current role."""
        return await self._role.first_attempt()

    async def wait_for_others(self) -> None:
        """Wait until it is clear who leads, then as that role does."""
        await self._settle()
        await self._role.wait_for_others()

    async def _settle(self) -> None:
        """Wait until it is clear who leads."""
        if self._takeover is not None:
            await self._takeover

    def is_last_attempt(self, *, failed: bool) -> bool:
        """Return what the current role knows."""
        return self._role.is_last_attempt(failed=failed)

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        """Wait until it is clear who leads, then report to it."""
        await self._settle()
        return await self._role.attempt_ended(report)

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        """Let the current role decide."""
        return self._role.worker_failed(failure)

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:
        """Report to the current role."""
        self._role.regroup_ready(called, ended, ready)

    def first_step(self, message: worker_messages.FirstStep) -> None:
        """Report to the current role."""
        self._role.first_step(message)

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
        for sock in self._sockets:
            sock.close()
