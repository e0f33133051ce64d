"""Which members have joined and which are missing, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.control.roster import Roster
from phalanx.errors import JoinError


@dataclass(frozen=True)
class MemberNames:
    """How members are called in messages."""

    noun: str = "node"  # or "task": a task of a scheduler, which is one rank
    hosts: tuple[str, ...] = ()  # by number, if they are known beforehand
    managed: bool = False  # all members were started together: one that cannot take part will not come again

    def name(self, member: int, host: str = "") -> str:
        """Return the name of a member, with its host if that is known."""
        host = host or (self.hosts[member] if member < len(self.hosts) else "")
        return f"{self.noun} {member} ({host})" if host else f"{self.noun} {member}"

    def listed(self, members: Sequence[int], most: int) -> str:
        """Return at most `most` members in one line."""
        more = f" and {len(members) - most} more" if len(members) > most else ""
        if self.hosts:
            return ", ".join(map(self.name, members[:most])) + more
        return f"{self.noun}{'s' if len(members) > 1 else ''} {', '.join(map(str, members[:most]))}{more}"


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

    def timed_out(self, timeout: float, rejected: Mapping[str, str]) -> JoinError:
        """Return the error for a rendezvous that took too long."""
        missing = self.roster.missing
        present = sorted(self.roster.members.items())[:16]
        joined = ", ".join(self.names.name(id_, info.host) for id_, info in present)
        details = [f"joined: {joined}", f"listening on {', '.join(self.addresses)}"]
        details += [f"rejected: {who}: {why}" for who, why in list(rejected.items())[-16:]]
        if not rejected:
            details.append("no connection attempts: was it started there, with this address? does a firewall drop it?")
        have = "has" if len(missing) == 1 else "have"
        by_hand = f"start the same command with -i {missing[0]} there; "
        return JoinError(
            f"{self.names.listed(missing, 16)} of {self.roster.expected} {have} not joined in {timeout:.0f} s",
            details=details,
            fix=f"{'' if self.names.managed else by_hand}--join-timeout waits longer",
        )
