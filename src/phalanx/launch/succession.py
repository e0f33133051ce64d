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

from phalanx.contract import line as words
from phalanx.control.member import Endpoint
from phalanx.control.messages import Roll
from phalanx.errors import JoinError
from phalanx.launch.attempt import Fall
from phalanx.launch.company import Orders, Report, Supervised, Verdict
from phalanx.launch.console import Console
from phalanx.launch.following import Following
from phalanx.launch.gathering import Gathering
from phalanx.launch.leading import Inheritance, Leading
from phalanx.launch.plan import Plan
from phalanx.launch.relay import Relay
from phalanx.launch.runfolder import RunFolder

_KNOCK = 3.0  # seconds for a machine to answer at all


class Succession:
    """A Company that is one thing first, and may become the other."""

    def __init__(
        self, plan: Plan, gathering: Gathering, folder: RunFolder, console: Console, door: Sequence[socket.socket]
    ) -> None:
        self._plan = plan
        self._gathering = gathering
        self._folder = folder
        self._console = console
        self._door = door
        self._following = Following(plan, gathering, folder, console, door=int(door[0].getsockname()[1]))
        self._following.heir = self
        self._role: Following | Leading = self._following
        self._supervised: Supervised | None = None
        self._succeeding: asyncio.Task[None] | None = None

    # -- the leader is lost

    def leader_lost(self, why: str, *, silent: bool) -> None:
        if self._succeeding is None or self._succeeding.done():
            self._succeeding = asyncio.get_running_loop().create_task(self._succeed(why, silent=silent))

    async def _succeed(self, why: str, *, silent: bool) -> None:
        following = self._following
        roll = following.roll
        if roll is None:
            following.give_up(why)
            return
        self._note(f"node {roll.leader} is lost: {why}")
        for peer in roll.peers:
            if peer.member == following.id:
                await self._lead(why, roll, silent=silent)
                return
            if await _answers(Endpoint(peer.address, peer.port)):
                try:
                    await following.follow(Endpoint(peer.address, peer.port), self._patience)
                except JoinError:
                    continue  # it is gone too, or still has its leader: it is we who are cut off
                self._note(f"node {peer.member} ({peer.host}) leads now")
                return
        following.give_up(why)

    async def _lead(self, why: str, roll: Roll, *, silent: bool) -> None:
        following, peers = self._following, roll.peers
        size = len(peers) + 1
        others = frozenset(peer.member for peer in peers if peer.member > following.id)
        gathering = replace(self._gathering, member=following.id, leads=True, meeting=None)
        leading = Leading(replace(self._plan, gathering=gathering), gathering, self._folder, self._console, self._door)
        if self._supervised is not None:
            leading.meet(self._supervised)
        following.relay = None
        self._role = leading
        await leading.take_over(
            Inheritance(
                leader=roll.leader,
                why=why,
                size=size,
                attempt=following.attempt,
                generation=following.generation,
                ability=following.ability,
                worked=frozenset(peer.member for peer in peers if peer.works),
                others=others,
                quorum=size // 2 + 1 if silent else 1,
            ),
            self._patience,
        )

    @property
    def _patience(self) -> float:
        """Some notice later than others that the leader is gone."""
        return self._gathering.lost_after + _KNOCK

    def _note(self, text: str) -> None:
        if self._supervised is not None:
            self._supervised.note(text)

    # -- as whatever it is now

    @property
    def relay(self) -> Relay | None:
        return self._role.relay

    def meet(self, supervised: Supervised) -> None:
        self._supervised = supervised
        self._role.meet(supervised)

    async def join(self) -> None:
        await self._role.join()

    async def orders(self) -> Orders | Verdict:
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

    async def concluded(self, report: Report) -> Orders | Verdict:
        await self._settle()
        return await self._role.concluded(report)

    def failing(self, fall: Fall) -> None:
        self._role.failing(fall)

    def able(self, called: bool, ended: bool, ready: bool) -> None:
        self._role.able(called, ended, ready)

    def going(self, message: words.Going) -> None:
        self._role.going(message)

    def halting(self, rank: int, message: words.Keeping | words.Standing | words.Halted) -> None:
        self._role.halting(rank, message)

    def preempt(self, number: signal.Signals) -> bool:
        return self._role.preempt(number)

    def signalled(self, number: signal.Signals) -> None:
        self._role.signalled(number)

    def passed(self, number: signal.Signals) -> None:
        self._role.passed(number)

    async def close(self, code: int, text: str) -> None:
        if self._succeeding is not None:
            self._succeeding.cancel()
        await self._role.close(code, text)
        for sock in self._door:
            sock.close()


async def _answers(endpoint: Endpoint) -> bool:
    """Whether somebody listens there: a process that has ended does not, and its machine says so at once."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), _KNOCK)
    except OSError:
        return False
    writer.close()
    return True
