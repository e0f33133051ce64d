"""A node of a run whose nodes come and go: it follows, until node 0 is lost and the leader's place falls to it.

Everybody has the roll: whoever is lowest on it takes over, opens the door that it has kept shut so far, and the others
come to it. So that two trainings never come of one, a leader that has only fallen silent is left by a majority alone:
it may still be there, on the other side of a link that is cut.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

from phalanx.contract import worker_messages as words
from phalanx.control.member import CONNECT_TIMEOUT, STEADILY, Endpoint, answers
from phalanx.control.messages import PeerList, RpcFrame
from phalanx.errors import JoinError, PhalanxError
from phalanx.launcher.agent.worker import WorkerFailure
from phalanx.launcher.coordination.actions import Action
from phalanx.launcher.coordination.coordinator import AgentView, AttemptReport, RunResult, StartAttempt
from phalanx.launcher.coordination.follower import FollowerCoordinator
from phalanx.launcher.coordination.leader import Inheritance, LeaderCoordinator
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
        gathering: RendezvousConfig,
        folder: RunFolder,
        console: Console,
        door: Sequence[socket.socket],
    ) -> None:
        self._plan = plan
        self._gathering = gathering
        self._folder = folder
        self._console = console
        self._door = door
        self._following = FollowerCoordinator(plan, gathering, folder, console, door=int(door[0].getsockname()[1]))
        self._following.heir = self
        self._role: FollowerCoordinator | LeaderCoordinator = self._following
        self._supervised: AgentView | None = None
        self._succeeding: asyncio.Task[None] | None = None

    # -- the leader is lost

    def leader_lost(self, why: str, *, silent: bool) -> None:
        before = self._succeeding  # one that took its place may be lost as soon as it has welcomed us
        self._succeeding = asyncio.get_running_loop().create_task(self._succeed(why, before, silent=silent))

    async def _succeed(self, why: str, before: asyncio.Task[None] | None, *, silent: bool) -> None:
        if before is not None:
            await before
        following = self._following
        if self._role is not following:
            return
        roll = following.roll
        if roll is None:
            following.give_up(why)
            return
        self._note(f"node {roll.leader} is lost: {why}")
        if not silent and following.door is not None and await answers(following.door, steadily=STEADILY):
            silent = True
            self._note(f"node {roll.leader} still answers: it is this node that was given up")
        for peer in roll.peers:
            if peer.member == following.id:
                if not following.running:  # it has nothing to go on with
                    break
                await self._lead(why, roll, silent=silent)
                return
            if await answers(Endpoint(peer.address, peer.port)):
                try:
                    await following.follow(Endpoint(peer.address, peer.port), self._patience)
                except JoinError:
                    continue  # it is gone too, or still has its leader: it is we who are cut off
                self._note(f"node {peer.member} ({peer.host}) leads now")
                return
        following.give_up(why)

    async def _lead(self, why: str, roll: PeerList, *, silent: bool) -> None:
        following, peers = self._following, roll.peers
        size = len(peers) + 1
        others = frozenset(peer.member for peer in peers if peer.member > following.id)
        gathering = replace(self._gathering, member=following.id, leads=True, meeting=None)
        leading = LeaderCoordinator(
            replace(self._plan, rendezvous=gathering), gathering, self._folder, self._console, self._door
        )
        if self._supervised is not None:
            leading.meet(self._supervised)
        following.relay = None
        self._role = leading
        dropping = asyncio.get_running_loop().create_task(following.drop())  # a silent one does not answer
        past = Inheritance(
            leader=roll.leader,
            why=why,
            size=size,
            attempt=following.ordered,
            generation=following.generation,
            ability=following.ability,
            worked=frozenset(peer.member for peer in peers if peer.works),
            others=others,
            quorum=size // 2 + 1 if silent else 1,
        )
        try:
            await leading.take_over(past, self._patience)
        except (OSError, PhalanxError) as error:
            leading.fail(f"node {roll.leader} is lost, and this node cannot take its place: {error}")
        await dropping

    @property
    def _patience(self) -> float:
        """Some notice later than others that the leader is gone."""
        return self._gathering.node_timeout + CONNECT_TIMEOUT

    def _note(self, text: str) -> None:
        if self._supervised is not None:
            self._supervised.note(text)

    # -- as whatever it is now

    @property
    def relay(self) -> LogForwarder | None:
        return self._role.relay

    @property
    def leads(self) -> bool:
        return self._role.leads

    @property
    def skew(self) -> float:
        return self._role.skew

    def members(self) -> dict[int, tuple[int, ...]]:
        return self._role.members()

    def carry(self, letter: RpcFrame, to: int | None) -> None:
        self._role.carry(letter, to)

    def address(self, member: int) -> str:
        return self._role.address(member)

    def meet(self, supervised: AgentView) -> None:
        self._supervised = supervised
        self._role.meet(supervised)

    async def join(self) -> None:
        await self._role.join()

    async def orders(self) -> StartAttempt | RunResult:
        return await self._role.orders()

    async def settled(self) -> None:
        await self._settle()
        await self._role.settled()

    async def _settle(self) -> None:
        """It has to be clear who leads before anybody is asked what comes next."""
        if self._succeeding is not None:
            await self._succeeding

    def last(self, *, failed: bool) -> bool:
        return self._role.last(failed=failed)

    async def concluded(self, report: AttemptReport) -> StartAttempt | RunResult:
        await self._settle()
        return await self._role.concluded(report)

    def failing(self, fall: WorkerFailure) -> Action | None:
        return self._role.failing(fall)

    def able(self, called: bool, ended: bool, ready: bool) -> None:
        self._role.able(called, ended, ready)

    def going(self, message: words.FirstStep) -> None:
        self._role.going(message)

    def halting(self, rank: int, message: words.Keeping | words.HaltAck | words.HaltedAt) -> None:
        self._role.halting(rank, message)

    def preempt(self, number: signal.Signals) -> bool:
        return self._role.preempt(number)

    def signalled(self, number: signal.Signals) -> None:
        self._role.signalled(number)

    def passed(self, number: signal.Signals) -> None:
        self._role.passed(number)

    def announce(self, code: int, text: str) -> None:
        self._role.announce(code, text)

    async def close(self, code: int, text: str) -> None:
        if self._succeeding is not None:
            self._succeeding.cancel()
        await self._role.close(code, text)
        for sock in self._door:
            sock.close()
