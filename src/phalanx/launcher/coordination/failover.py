"""A node of a run whose nodes come and go: it follows, until node 0 is lost and the leader's place falls to it.

Everybody has the peers: whoever is lowest on it takes over, opens the door that it has kept shut so far, and the others
come to it. So that two trainings never come of one, a leader that has only fallen silent is left by a majority alone:
it may still be there, on the other side of a link that is cut.
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
    """A coordinator that follows first, and may lead later."""

    def __init__(
        self,
        plan: Plan,
        rendezvous: RendezvousConfig,
        folder: RunFolder,
        console: Console,
        door: Sequence[socket.socket],
    ) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._folder = folder
        self._console = console
        self._door = door
        self._following = FollowerCoordinator(plan, rendezvous, folder, console, door=int(door[0].getsockname()[1]))
        self._following.failover = self
        self._role: FollowerCoordinator | LeaderCoordinator = self._following
        self._agent: AgentView | None = None
        self._takeover: asyncio.Task[None] | None = None

    # -- the leader is lost

    def leader_lost(self, why: str, *, silent: bool) -> None:
        before = self._takeover  # one that took its place may be lost as soon as it has welcomed us
        self._takeover = asyncio.get_running_loop().create_task(self._replace_leader(why, before, silent=silent))

    async def _replace_leader(self, why: str, before: asyncio.Task[None] | None, *, silent: bool) -> None:
        if before is not None:
            await before
        following = self._following
        if self._role is not following:
            return
        peers = following.peer_list
        if peers is None:
            following.give_up(why)
            return
        self._note(f"node {peers.leader} is lost: {why}")
        if not silent and following.door is not None and await answers(following.door, steadily=STEADILY):
            silent = True
            self._note(f"node {peers.leader} still answers: it is this node that was given up")
        for peer in peers.peers:
            if peer.member == following.id:
                if not following.running:  # it has nothing to go on with
                    break
                await self._lead(why, peers, silent=silent)
                return
            if await answers(Endpoint(peer.address, peer.port)):
                try:
                    await following.follow(Endpoint(peer.address, peer.port), self._patience)
                except JoinError:
                    continue  # it is gone too, or still has its leader: it is we who are cut off
                self._note(f"node {peer.member} ({peer.host}) leads now")
                return
        following.give_up(why)

    async def _lead(self, why: str, peers: PeerList, *, silent: bool) -> None:
        following = self._following
        size = len(peers.peers) + 1
        others = frozenset(peer.member for peer in peers.peers if peer.member > following.id)
        rendezvous = replace(self._rendezvous, member=following.id, leads=True, leader_file=None)
        leading = LeaderCoordinator(
            replace(self._plan, rendezvous=rendezvous), rendezvous, self._folder, self._console, self._door
        )
        if self._agent is not None:
            leading.attach(self._agent)
        following.log_forwarder = None
        self._role = leading
        dropping = asyncio.get_running_loop().create_task(following.drop())  # a silent one does not answer
        state = TakeoverState(
            leader=peers.leader,
            why=why,
            size=size,
            attempt=following.ordered,
            generation=following.generation,
            readiness=following.readiness,
            worked=frozenset(peer.member for peer in peers.peers if peer.works),
            others=others,
            quorum=size // 2 + 1 if silent else 1,
        )
        try:
            await leading.take_over(state, self._patience)
        except (OSError, PhalanxError) as error:
            leading.fail(f"node {peers.leader} is lost, and this node cannot take its place: {error}")
        await dropping

    @property
    def _patience(self) -> float:
        """Some notice later than others that the leader is gone."""
        return self._rendezvous.node_timeout + CONNECT_TIMEOUT

    def _note(self, text: str) -> None:
        if self._agent is not None:
            self._agent.note(text)

    # -- as whatever it is now

    @property
    def log_forwarder(self) -> LogForwarder | None:
        return self._role.log_forwarder

    @property
    def leads(self) -> bool:
        return self._role.leads

    @property
    def skew(self) -> float:
        return self._role.skew

    def members(self) -> dict[int, tuple[int, ...]]:
        return self._role.members()

    def send_rpc(self, frame: RpcFrame, to: int | None) -> None:
        self._role.send_rpc(frame, to)

    def address(self, member: int) -> str:
        return self._role.address(member)

    def attach(self, agent: AgentView) -> None:
        self._agent = agent
        self._role.attach(agent)

    async def join(self) -> None:
        await self._role.join()

    async def first_attempt(self) -> StartAttempt | RunResult:
        return await self._role.first_attempt()

    async def wait_for_others(self) -> None:
        await self._settle()
        await self._role.wait_for_others()

    async def _settle(self) -> None:
        """It has to be clear who leads before anybody is asked what comes next."""
        if self._takeover is not None:
            await self._takeover

    def is_last_attempt(self, *, failed: bool) -> bool:
        return self._role.is_last_attempt(failed=failed)

    async def attempt_ended(self, report: AttemptReport) -> StartAttempt | RunResult:
        await self._settle()
        return await self._role.attempt_ended(report)

    def worker_failed(self, failure: WorkerFailure) -> Action | None:
        return self._role.worker_failed(failure)

    def regroup_ready(self, called: bool, ended: bool, ready: bool) -> None:
        self._role.regroup_ready(called, ended, ready)

    def first_step(self, message: worker_messages.FirstStep) -> None:
        self._role.first_step(message)

    def halt_message(
        self, rank: int, message: worker_messages.Keeping | worker_messages.HaltAck | worker_messages.HaltedAt
    ) -> None:
        self._role.halt_message(rank, message)

    def preempt(self, number: signal.Signals) -> bool:
        return self._role.preempt(number)

    def signal_received(self, number: signal.Signals) -> None:
        self._role.signal_received(number)

    def forward_signal(self, number: signal.Signals) -> None:
        self._role.forward_signal(number)

    def announce_result(self, code: int, text: str) -> None:
        self._role.announce_result(code, text)

    async def close(self, code: int, text: str) -> None:
        if self._takeover is not None:
            self._takeover.cancel()
        await self._role.close(code, text)
        for sock in self._door:
            sock.close()
