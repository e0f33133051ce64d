"""Which members have joined, which are missing, and which ranks each gets. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.contract.ranks import topology
from phalanx.contract.ranks.placement import RankPlacement
from phalanx.control.messages import NodeInfo, Refusal

# Compared by their first number: a different one is a different program.
_VERSIONS = ("phalanx", "python", "torch", "nccl")


@dataclass(frozen=True)
class RankTable:
    """The placements of the ranks of one member. Empty: not known."""

    placements: tuple[RankPlacement, ...] = ()

    @cached_property  # used for every line of output and every sample
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the member."""
        return tuple(placement.rank for placement in self.placements)


@dataclass
class Roster:
    """The members that have joined. The leader is the first."""

    expected: int  # members that get ranks
    promised: tuple[int, ...] = ()  # slots per node, if given by the user
    least: int = 0  # the fewest members with which the run can start and continue; 0: all
    spares: int = 0  # members that wait to replace a lost one
    members: dict[int, NodeInfo] = field(default_factory=dict)
    _from: int = 0  # no number below it is free: avoids scanning thousands

    @property
    def room(self) -> int:
        """The number of members, including spares."""
        return self.expected + self.spares

    @property
    def missing(self) -> list[int]:
        """The numbers of missing members."""
        return [id_ for id_ in range(self.expected) if id_ not in self.members]

    @property
    def complete(self) -> bool:
        """Whether all members and spares have joined."""
        return len(self.members) >= self.room

    @property
    def enough(self) -> bool:
        """Whether enough members have joined to start."""
        return len(self.members) >= (self.least or self.expected)

    def admit(self, info: NodeInfo) -> int | Refusal:
        """Add a member. Return its number, or the reason why it cannot take part."""
        refusal = self._against(info)
        if refusal is not None:
            return refusal
        id_ = info.member if info.member is not None else self._free()
        self.members[id_] = info
        return id_

    def remove(self, member: int) -> None:
        """Remove a member."""
        if self.members.pop(member, None) is not None:
            self._from = min(self._from, member)

    def _free(self) -> int:
        self._from = next(id_ for id_ in range(self._from, self.room) if id_ not in self.members)
        return self._from

    def _against(self, info: NodeInfo) -> Refusal | None:
        leader = next(iter(self.members.values()), None)
        if leader is not None:
            found = _differs(leader, info)
            if found is not None:
                return found
        id_ = info.member
        if id_ is None and self.complete:
            return Refusal(kind="taken", leader=f"all {self.room} nodes are here", member="one more")
        if id_ is not None and id_ >= self.room:
            return Refusal(kind="plan", leader=f"{self.room} nodes", member=f"node {id_}")
        if id_ in self.members:
            holder = self.members[id_]
            return Refusal(kind="taken", leader=f"{holder.host}, pid {holder.pid}", member=f"node {id_}")
        if info.trouble:
            return Refusal(kind="trouble", leader="", member=info.trouble)
        id_ = self._free() if id_ is None else id_
        promised = self.promised[id_ : id_ + 1] or (info.slots,)  # a spare may have any number
        if info.claim is None and info.slots != promised[0]:
            return Refusal(kind="devices", leader=_workers(promised[0]), member=_workers(info.slots))
        return None

    def warnings(self, info: NodeInfo) -> list[str]:
        """Return differences that may be intended."""
        leader = next(iter(self.members.values()), info)
        found = []
        for name in _VERSIONS:
            ours, theirs = leader.versions.get(name, ""), info.versions.get(name, "")
            if ours != theirs and ours and theirs:
                found.append(f"{info.host} has {name} {theirs}, {leader.host} {ours}")
        for name in sorted({*leader.terms, *info.terms} - {"nodes", "workers", "script"}):
            if leader.terms.get(name) != info.terms.get(name):
                found.append(f"{info.host} was started with other {name} than {leader.host}")
        return found


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _differs(leader: NodeInfo, info: NodeInfo) -> Refusal | None:
    if leader.run and info.run and leader.run != info.run:
        return Refusal(kind="run", leader=leader.run, member=info.run)
    for name in _VERSIONS:
        ours, theirs = leader.versions.get(name, ""), info.versions.get(name, "")
        if ours and theirs and ours.split(".")[0] != theirs.split(".")[0]:
            return Refusal(kind="version", leader=f"{name} {ours}", member=f"{name} {theirs}")
    for name in ("nodes", "workers", "script"):
        ours, theirs = leader.terms.get(name, ""), info.terms.get(name, "")
        if ours and theirs and ours != theirs:
            return Refusal(kind="plan", leader=f"{name}: {ours}", member=f"{name}: {theirs}")
    return None


def one_a_rank(members: Mapping[int, NodeInfo]) -> bool:
    """Return whether a scheduler has started one task per rank, not one per node."""
    claims = [info.claim for info in members.values()]
    return all(claims) and any(claim is not None and (claim.local_world_size or 1) > 1 for claim in claims)


def working(members: Mapping[int, NodeInfo], before: Collection[int], most: int) -> dict[int, NodeInfo]:
    """Return the members that get ranks: those that had some before, and replacements for lost ones."""
    kept = [id_ for id_ in sorted(members) if id_ in before]
    others = [id_ for id_ in sorted(members) if id_ not in before]
    return {id_: members[id_] for id_ in sorted([*kept, *others][:most])}


def seat(members: Mapping[int, NodeInfo]) -> dict[int, RankTable]:
    """Assign ranks to members in order, or as assigned by a scheduler."""
    if one_a_rank(members):
        return _as_claimed(members)
    tables: dict[int, RankTable] = {}
    world_size = sum(member.slots for member in members.values())
    first = 0
    for node_rank, id_ in enumerate(sorted(members)):
        slots = members[id_].slots
        tables[id_] = RankTable(
            tuple(
                RankPlacement(
                    rank=first + local_rank,
                    world_size=world_size,
                    local_rank=local_rank,
                    local_world_size=slots,
                    node_rank=node_rank,
                    node_count=len(members),
                )
                for local_rank in range(slots)
            )
        )
        first += slots
    return tables


def spare_table(slots: int, tables: Mapping[int, RankTable]) -> RankTable:
    """Return the placements of the workers of a spare node: they are numbered after the ranks of the other members."""
    others = [placement for table in tables.values() for placement in table.placements]
    world_size, node_count = len(others), len({placement.node_rank for placement in others})
    return RankTable(
        tuple(
            RankPlacement(
                rank=world_size + local_rank,
                world_size=world_size,
                local_rank=local_rank,
                local_world_size=slots,
                node_rank=0,
                node_count=node_count,
            )
            for local_rank in range(slots)
        )
    )


def _as_claimed(members: Mapping[int, NodeInfo]) -> dict[int, RankTable]:
    claimed = [(info.claim, info.host, id_) for id_, info in members.items() if info.claim is not None]
    claimed.sort(key=lambda one: one[0].rank)
    # If the scheduler does not number its nodes: in the order of their lowest rank.
    hosts = list(dict.fromkeys(host for _, host, _ in claimed))
    node_ranks = [hosts.index(host) if claim.node_rank is None else claim.node_rank for claim, host, _ in claimed]
    return {
        id_: RankTable(
            (
                RankPlacement(
                    rank=claim.rank,
                    world_size=len(claimed),
                    local_rank=claim.local_rank or 0,
                    local_world_size=claim.local_world_size or 1,
                    node_rank=node_rank,
                    node_count=len(set(node_ranks)),
                ),
            )
        )
        for node_rank, (claim, _, id_) in zip(node_ranks, claimed, strict=True)
    }


def world(tables: Mapping[int, RankTable]) -> str:
    """Return which ranks share a node, in the form that workers get."""
    nodes: dict[int, list[int]] = {}
    for table in tables.values():
        for placement in table.placements:
            nodes.setdefault(placement.node_rank, []).append(placement.rank)
    return topology.encode([sorted(nodes[node]) for node in sorted(nodes)])
