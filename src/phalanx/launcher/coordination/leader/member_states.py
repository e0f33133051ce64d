"""Which members have ranks, which are spares, and whether their workers can regroup. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from phalanx.control.leader import roster
from phalanx.control.leader.roster import RankTable, Roster
from phalanx.control.messages import AttemptState, StartRanks
from phalanx.launcher.workers.regroup.readiness import Readiness, ReadinessTable

_NO_RANKS = RankTable()


class MemberStates:
    """The members of a run with their ranks and their readiness.

    A member without ranks is idle until its workers are started as spares. It is ready when they have all connected,
    and gets ranks in the next regroup.
    """

    def __init__(self, roster_: Roster, own: int) -> None:
        self.own = own  # the number of this node
        self.ranks: dict[int, RankTable] = {}  # of the members with ranks
        self.leaving: set[int] = set()
        self.joiners: set[int] = set()  # members that got ranks in a regroup of this attempt
        self.on_trial: set[int] = set()  # those of them that have not committed a step yet
        self._roster = roster_
        self._readiness = ReadinessTable()  # of the members with ranks
        self._topology: str | None = None  # of the ranks; None: not computed yet
        self._idle: set[int] = set()
        self._starting: set[int] = set()  # their spare workers have been started
        self._ready: set[int] = set()

    # -- questions

    @property
    def min_nodes(self) -> int:
        """Return the minimum number of nodes with which the run can continue."""
        return self._roster.least or self._roster.expected

    @property
    def enough(self) -> bool:
        """Return whether enough members have ranks or can get some."""
        return len(self.ranks) + len(self._ready) >= self.min_nodes

    @property
    def room(self) -> int:
        """Return how many more members can get ranks."""
        return self._roster.expected - len(self.ranks)

    @property
    def readiness(self) -> Readiness:
        """Return the readiness of all members with ranks."""
        return self._readiness.overall

    def can_regroup(self, member: int) -> bool:
        """Return whether the workers of this member can regroup."""
        return self._readiness[member].can_regroup

    @property
    def training_over(self) -> bool:
        """Return whether workers have finished on a member that is not on trial. One on trial is no evidence: several
        nodes may join with the same mistake.
        """
        return any(self._readiness[member].finished for member in self._readiness if member not in self.on_trial)

    def cannot_take_part(self, member: int, *, ends_run: bool) -> bool:
        """Return whether a failure of workers shows that a node which has joined a healthy run cannot take part.

        `ends_run`: the failure would end the run, because it repeats.
        """
        if member not in self.ranks:
            return member not in self.leaving  # its spare workers do not start
        return member in self.on_trial or (ends_run and member in self.joiners)

    def next_ready(self) -> list[int]:
        """Return the members that would get ranks in a regroup. Empty if there is no room, or too few."""
        return sorted(self._ready)[: self.room] if self.room > 0 and self.enough else []

    def next_idle(self, connected: Collection[int]) -> list[int]:
        """Return the idle members that would get ranks in a restart."""
        return self._idle_among(connected)[: self.room] if self.room > 0 else []

    def _idle_among(self, connected: Collection[int]) -> list[int]:
        return sorted(member for member in self._idle if member in connected)

    @property
    def topology(self) -> str:
        """Return which ranks share a node, in the form that workers get. It is computed once: every member gets the
        same.
        """
        if self._topology is None:
            self._topology = roster.world(self.ranks)
        return self._topology

    def start_ranks(self, member: int, store_port: int) -> StartRanks:
        """Return the placements of the workers of a member."""
        table = self.ranks.get(member)
        if spare := table is None:
            table = roster.spare_table(self._roster.members[member].slots, self.ranks)
        return StartRanks(
            placements=table.placements,
            topology=self.topology,
            store_port=store_port,
            spare=spare,
            joins=spare and self.room > len(self._before(member)),
        )

    def _before(self, member: int) -> set[int]:
        """Return the members that get ranks before this one: those that are ready, or have joined earlier."""
        return {other for other in self._starting if other < member} | (self._ready - {member})

    # -- changes

    def start_attempt(self, connected: Collection[int]) -> None:
        """Assign ranks for an attempt to all members that stay."""
        for waiting in (self._starting, self._ready, self.joiners, self.on_trial):
            waiting.clear()
        self._assign(self._roster.members.keys() - self.leaving)
        self._readiness = ReadinessTable((member, Readiness()) for member in self.ranks)
        self._idle = set(connected) - self.ranks.keys() - self.leaving

    def regroup(self) -> None:
        """Assign ranks again, to the members that have some and those that are ready."""
        before = self.ranks.keys()
        self._assign(self.ranks.keys() | self._ready)
        self.joiners |= self.ranks.keys() - before
        self.on_trial |= self.ranks.keys() - before - {self.own}  # a spare node may lead instead of a lost leader
        for member in self.ranks:
            if member not in self._readiness:
                self._readiness[member] = Readiness(connected=True)
        self._ready -= self.ranks.keys()

    def _assign(self, members: Collection[int]) -> None:
        known = {member: self._roster.members[member] for member in members}
        working = roster.working(known, self.ranks.keys() | {self.own}, self._roster.expected)
        self.ranks, self._topology = roster.seat(working), None

    def expect(self, members: Collection[int], worked: Collection[int], own: Readiness) -> None:
        """Take over the members of a lost leader. `worked`: those that had ranks. `own`: the readiness of this node."""
        self._readiness = ReadinessTable([(self.own, own)])
        self.ranks, self._topology = dict.fromkeys(set(members) & set(worked), _NO_RANKS), None
        self._starting = set(members) - set(worked)
        if own.all_connected:
            self._spare_ready(self.own)

    def keep(self, members: Collection[int]) -> None:
        """Remove all members but these."""
        for member in (self.ranks.keys() | self._starting | self._ready) - set(members):
            self.remove(member)

    def admit(self, member: int, resumes: AttemptState | None) -> bool:
        """Add a member that joined during the run. Return whether it is idle now.

        `resumes`: it comes from a lost leader, and its workers belong to this attempt.
        """
        if resumes is not None and member in self.ranks:
            # Keep later reports.
            if member not in self._readiness:
                self._readiness[member] = Readiness(resumes.connected, resumes.finished)
            return False
        if resumes is not None and not resumes.finished:
            self._starting.add(member)
            if resumes.all_connected:
                self._spare_ready(member)
            return False
        self.remove(member)
        self._idle.add(member)
        return True

    def set_readiness(self, member: int, readiness: Readiness) -> bool:
        """Record the readiness of a member. Return whether a spare became ready."""
        if member in self.ranks:
            self._readiness[member] = readiness
            return False
        return readiness.all_connected and self._spare_ready(member)

    def _spare_ready(self, member: int) -> bool:
        if member not in self._starting:
            return False
        self._starting.discard(member)
        self._ready.add(member)
        return True

    def spare_ended(self, member: int) -> None:
        """Record that the workers of a member without ranks have ended."""
        self._starting.discard(member)
        self._ready.discard(member)

    def start_spares(self, connected: Collection[int]) -> list[int]:
        """Return the idle members whose workers are to be started as spares now."""
        started = self._idle_among(connected) if self._idle and self.readiness.can_regroup else []
        self._idle -= set(started)
        self._starting |= set(started)
        return started

    def remove(self, member: int) -> RankTable | None:
        """Remove a member. Return the ranks that it had."""
        self._readiness.remove(member)
        self._topology = None
        for waiting in (self._idle, self._starting, self._ready, self.joiners, self.on_trial):
            waiting.discard(member)
        return self.ranks.pop(member, None)
