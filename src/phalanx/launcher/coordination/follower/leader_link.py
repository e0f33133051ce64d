"""The link of a follower to its leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from phalanx.control import messages
from phalanx.control.endpoint import Endpoint
from phalanx.control.member.member import Member
from phalanx.launcher.coordination.context import NodeContext
from phalanx.launcher.coordination.follower.orders import FollowerState, LeaderOrders
from phalanx.launcher.coordination.rank_assignment import node_info
from phalanx.launcher.rendezvous_config import RendezvousConfig


class LeaderLink:
    """The leader, as a follower reaches it: see `NodeLinks`. `member` is the connection to the current leader."""

    leads = False

    def __init__(self, context: NodeContext, orders: LeaderOrders) -> None:
        rendezvous = context.rendezvous
        self._token = rendezvous.token
        self._info = node_info(context.plan, rendezvous, failover_port=context.port)
        self._orders = orders
        self.member = Member(rendezvous.token, self._info, leader_endpoints(rendezvous), events=orders)

    async def follow(self, endpoint: Endpoint, state: FollowerState, timeout: float) -> None:
        """Join another leader instead of the lost one. Raises JoinError."""
        info = msgspec.structs.replace(self._info, member=state.member, resumes=state.resumes())
        before, member = self.member, Member(self._token, info, lambda: [endpoint], events=self._orders)
        self.member = member  # its messages may arrive before join returns
        await before.drop()
        await member.join(timeout)

    def send(self, message: messages.Message) -> None:
        """Send a message to the current leader."""
        self.member.send(message)

    @property
    def skew(self) -> float:
        """Return the clock of this node minus the leader's, in seconds."""
        return self.member.skew

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return nothing: a follower has no members."""
        return {}

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        """Send a frame to the leader. One to another member is dropped."""
        if to is None:
            self.send(frame)

    def backlog(self, to: int | None) -> int:
        """Return the bytes that the leader has not received yet."""
        return self.member.backlog if to is None else 0

    def address(self, member: int) -> str:  # noqa: ARG002
        """Return an empty address: a follower knows only its leader."""
        return ""

    def on_trial(self) -> frozenset[int]:
        """Return no ranks: the leader knows them."""
        return frozenset()

    def dismiss(self, ranks: Sequence[int], why: str) -> bool:  # noqa: ARG002
        """Return False: the leader decides."""
        return False


def leader_endpoints(rendezvous: RendezvousConfig) -> Callable[[], Sequence[Endpoint]]:
    """Return a function that lists the possible addresses of the leader, most likely first. Call it before each
    attempt.
    """

    def where() -> list[Endpoint]:
        location = rendezvous.location
        found = [Endpoint(address, location.port) for address in location.addresses]
        if location.host is not None and location.port:
            found.append(Endpoint(location.host, location.port))
        published = location.file.read() if location.file is not None else None
        if published is not None:
            found += [Endpoint(address, published.port) for address in published.addresses]
        return list(dict.fromkeys(found))

    return where


async def decline(rendezvous: RendezvousConfig, why: str) -> None:
    """Tell the leader, if there is one, why this node cannot take part."""
    member = Member(
        rendezvous.token,
        node_info(None, rendezvous, why[: 1 << 14]),
        leader_endpoints(rendezvous),
        events=_IgnoredEvents(),
    )
    await member.decline()


class _IgnoredEvents:
    def message_received(self, message: messages.FromLeader) -> None: ...
    def leader_lost(self, why: str, *, silent: bool) -> None: ...
    def note(self, text: str) -> None: ...
    def waiting(self, text: str) -> None: ...
