"""The links of the leader to its members."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.control import messages
from phalanx.control.leader.members import Members
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_changes import NodeChanges


class MemberLinks:
    """The members, as the leader reaches them: see `NodeLinks`."""

    leads = True
    skew = 0.0

    def __init__(self, members: Members, member_states: MemberStates, changes: NodeChanges) -> None:
        self._members = members
        self._member_states = member_states
        self._changes = changes

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each connected follower."""
        connected, ranks = self._members.connected, self._member_states.ranks
        return {member: table.ranks for member, table in ranks.items() if member in connected}

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Send a frame to a member."""
        if to is not None:
            self._members.send(to, frame)

    def backlog(self, to: int | None) -> int:
        """Return the bytes that a member has not received yet."""
        connected = self._members.connected.get(to) if to is not None else None
        return connected.outbox.size if connected is not None else 0

    def address(self, member: int) -> str:
        """Return the address of a member as seen from here. Empty if it is not connected."""
        connected = self._members.connected.get(member)
        return connected.address if connected is not None else ""

    def on_trial(self) -> frozenset[int]:
        """Return the ranks of nodes that have joined a running group, and have not committed a step yet."""
        states = self._member_states
        return frozenset(rank for member in states.on_trial for rank in states.ranks[member].ranks)

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:
        """Continue without the member that has these ranks. False: the run is not elastic, or too few would remain."""
        return self._changes.trials.dismiss_ranks(ranks, why)
