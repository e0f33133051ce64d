"""Pings all members, and detects those that do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.control.leader.members import JoinedMember, Members

QUIET = 3.0  # seconds without a message from a member after which a note is printed


@dataclass(frozen=True)
class Timing:
    """Intervals and timeouts, in seconds."""

    ping: float = 1.0
    node_timeout: float = 15.0
    patience: float = 10.0  # for a caller to authenticate
    last_call: float = 0.0  # for others to join once enough have joined

    def rest(self, members: int) -> float:
        """Return the seconds between two pings: more for thousands of members."""
        return min(max(self.ping, members / 1000), self.node_timeout / 3)

    @property
    def resume(self) -> float:
        """Return the seconds that a member has for a new connection when the old one broke."""
        return self.node_timeout / 3

    def quiet(self, members: int) -> float:
        """Return the seconds of silence after which a note is printed."""
        return min(max(QUIET, 2 * self.rest(members)), self.node_timeout / 2)


class LivenessMonitor:
    """Pings all members. `lost`: called with a member that is silent for too long, and why."""

    def __init__(
        self,
        members: Members,
        timing: Timing,
        *,
        note: Callable[[str], None],
        lost: Callable[[JoinedMember, str], None],
    ) -> None:
        self._members = members
        self._timing = timing
        self._note = note
        self._lost = lost
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start pinging."""
        self._task = asyncio.get_running_loop().create_task(self._ping_members())

    def close(self) -> None:
        """Stop pinging."""
        if self._task is not None:
            self._task.cancel()

    async def _ping_members(self) -> None:
        rest = self._timing.rest(self._members.roster.expected)
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(rest)
            now = time.monotonic()
            late = now - asleep - rest
            self._members.ping()
            for member in list(self._members.connected.values()):
                if late > 1:  # this process was stopped, or the machine was asleep
                    member.last_message = min(member.last_message + late, now)
                    member.outbox.excuse(late)
                self._check(member, now - member.last_message)
                self._check_reading(member, member.outbox.stalled(now))

    def _check_reading(self, member: JoinedMember, stalled: float) -> None:
        """Drop a member that sends messages, but does not read."""
        if stalled > self._timing.node_timeout:
            member.drop(f"it has not read what was sent to it for {stalled:.0f} s (--node-timeout)")

    def _check(self, member: JoinedMember, silence: float) -> None:
        limit = self._timing.quiet(self._members.roster.expected)
        if silence > self._timing.node_timeout:
            self._lost(member, f"no message from it for {silence:.0f} s (--node-timeout): link or machine is down")
            member.abort()
        elif silence > limit and not member.unresponsive:
            member.unresponsive = True
            self._note(f"{self._members.name(member.id)} has not answered for {silence:.0f} s")
        elif silence <= limit and member.unresponsive:
            member.unresponsive = False
            self._note(f"{self._members.name(member.id)} answers again")
