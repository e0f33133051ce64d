"""The interface to the other nodes of a run: who they are, and how messages reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.control import messages


class NodeLinks(Protocol):
    """The other nodes, as this node reaches them: a leader its members, a follower its leader.

    SingleNodeLinks   there is no other node (coordination/single_node.py)
    MemberLinks       of the leader (coordination/leader/member_links.py)
    LeaderLink        of a follower (coordination/follower/leader_link.py)
    RoleLinks         of a node that may become the leader (coordination/follower/failover.py)
    """

    @property
    def leads(self) -> bool:
        """Return whether this node is the leader."""
        ...

    @property
    def skew(self) -> float:
        """Return the clock of this node minus the leader's, in seconds."""
        ...

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each follower. Empty on a node that does not lead."""
        ...

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Send a frame to a member or, if `to` is None, to the leader."""

    def backlog(self, to: int | None) -> int:
        """Return the bytes that a member or, if `to` is None, the leader has not received yet."""
        ...

    def address(self, member: int) -> str:
        """Return the address of a member as seen from here. Empty if unknown."""
        ...

    def on_trial(self) -> frozenset[int]:
        """Return the ranks of nodes that have joined a running group, and have not committed a step yet."""
        ...

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:
        """Continue without the node that has these ranks. Return False if that is not possible."""
        ...
