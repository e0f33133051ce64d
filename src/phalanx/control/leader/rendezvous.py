"""The rendezvous: waits until the members have joined, and reports which are missing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from phalanx.control.leader.members import MemberNames, Members
from phalanx.control.leader.roster import Roster
from phalanx.control.refusals import Rejection
from phalanx.errors import JoinError


@dataclass
class RendezvousStatus:
    """The progress of a rendezvous."""

    roster: Roster
    names: MemberNames
    addresses: list[str] = field(default_factory=list)  # that the leader listens on

    def joined_and_missing(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the hosts that have joined and the names of missing members."""
        joined = tuple(info.host for _, info in sorted(self.roster.members.items()))
        return joined, tuple(map(self.names.name, self.roster.missing))

    def progress(self, waited: float) -> str:
        """Return the progress after `waited` seconds as a line."""
        joined = f"{len(self.roster.members)} of {self.roster.expected} {self.names.noun}s joined"
        if self.roster.enough:
            return f"{joined}, which is enough: last call for the others"
        return f"{joined}, waiting for {self.names.listed(self.roster.missing, 8)} ({waited:.0f} s)"

    def timed_out(self, timeout: float, rejected: Mapping[str, Rejection]) -> JoinError:
        """Return the error for a rendezvous that took too long."""
        missing = self.roster.missing
        present = sorted(self.roster.members.items())[:16]
        joined = ", ".join(self.names.name(id_, info.host) for id_, info in present)
        details = [f"joined: {joined}", f"listening on {', '.join(self.addresses)}"]
        details += [f"rejected: {who}: {rejection.why}" for who, rejection in list(rejected.items())[-16:]]
        if not rejected:
            details.append("no connection attempts: was it started there, with this address? does a firewall drop it?")
        have = "has" if len(missing) == 1 else "have"
        fixes = [] if self.names.managed else [f"start the same command with -i {missing[0]} there"]
        if rejected:  # it was started there
            fixes = [list(rejected.values())[-1].fix or "see why it was rejected"]
            fixes += [] if self.names.managed else ["then start it there again"]
        if len(rejected) < len(missing):
            fixes.append("--join-timeout waits longer")
        return JoinError(
            f"{self.names.listed(missing, 16)} of {self.roster.expected} {have} not joined in {timeout:.0f} s",
            details=details,
            fix="; ".join(fixes),
        )


class Rendezvous:
    """Waits until the members have joined. `begun`: from then on the run continues without the missing ones."""

    def __init__(self, members: Members, *, last_call: float) -> None:
        self.status = RendezvousStatus(members.roster, members.names)
        self.begun = members.roster.complete
        self._members = members
        self._last_call = last_call  # seconds for others to join once enough have joined
        self._latest = time.monotonic()  # when the latest member joined
        self._survivors = False  # members of a lost leader are expected
        self._failure: JoinError | None = None
        self._changed = asyncio.Event()  # enough have joined, or one cannot

    def member_joined(self) -> bool:
        """Record that a member joined. Return whether the run had begun before."""
        self._latest = time.monotonic()
        late, roster = self.begun, self._members.roster
        self.begun = late or roster.complete
        if roster.enough or self._survivors:
            self._changed.set()
        return late

    def fail(self, error: JoinError) -> None:
        """End the rendezvous: a member that cannot be replaced cannot take part."""
        self._failure = error
        self._changed.set()

    async def wait(
        self, timeout: float, rejected: Mapping[str, Rejection], progress: Callable[[str, float], None]
    ) -> None:
        """Wait until all members, or enough of them, have joined. Raises JoinError, which names the missing ones with
        the reason.

        `rejected`: rejected callers. `progress` is called repeatedly with a line and the seconds waited.
        """
        start, roster = time.monotonic(), self._members.roster
        while not self.begun:
            now = time.monotonic()
            waited, left = now - start, self._latest + self._last_call - now
            if roster.enough and left <= 0:
                self.begun = True
                break
            if self._failure is not None:
                raise self._failure
            if waited >= timeout:
                raise self.status.timed_out(timeout, rejected)
            progress(self.status.progress(waited), waited)
            await self._wait_for_change(min(1.0, timeout - waited + 0.01, left + 0.01 if roster.enough else 1.0))

    async def wait_for_survivors(self, members: Collection[int], timeout: float) -> None:
        """Wait for members of a lost leader to join this one, at most `timeout` seconds. Then the run continues."""
        self._survivors = True
        until = time.monotonic() + timeout
        while not set(members) <= self._members.connected.keys() and (left := until - time.monotonic()) > 0:
            await self._wait_for_change(left)
        self.begun = True

    async def _wait_for_change(self, timeout: float) -> None:
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
