"""The links of a node to the other nodes, in each role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from phalanx.control.messages import RpcFrame
from phalanx.launcher.coordination.follower.failover import RoleLinks
from phalanx.launcher.coordination.follower.leader_link import LeaderLink
from phalanx.launcher.coordination.leader.member_links import MemberLinks
from phalanx.launcher.coordination.single_node import SingleNodeLinks

FRAME = RpcFrame(kind="why", number=1, content=b"")


def member_links(sent: list[Any]) -> MemberLinks:
    """The links of a leader: member 1 is connected, member 2 was lost."""
    connection = SimpleNamespace(address="10.0.0.2", outbox=SimpleNamespace(size=7))
    members: Any = SimpleNamespace(connected={1: connection}, send=lambda to, frame: sent.append((to, frame)))
    tables = {rank: SimpleNamespace(ranks=(rank,)) for rank in range(3)}
    states: Any = SimpleNamespace(ranks=tables)
    changes: Any = SimpleNamespace(trials=SimpleNamespace(dismiss_ranks=lambda ranks, why: ranks == (1,)))
    return MemberLinks(members, states, changes)


def leader_link(sent: list[Any]) -> LeaderLink:
    link = LeaderLink.__new__(LeaderLink)  # without a connection
    link.member = SimpleNamespace(skew=0.5, backlog=9, send=sent.append)  # type: ignore[assignment]
    return link


def test_a_leader_reaches_its_connected_members() -> None:
    sent: list[Any] = []
    links = member_links(sent)
    links.send_rpc(FRAME, 1)
    links.send_rpc(FRAME, None)  # to itself: NodeRpc handles that without sending
    assert sent == [(1, FRAME)]
    assert (links.leads, links.skew, links.members()) == (True, 0.0, {1: (1,)})
    assert (links.backlog(1), links.backlog(2), links.backlog(None)) == (7, 0, 0)
    assert (links.address(1), links.address(2)) == ("10.0.0.2", "")
    assert (links.dismiss((1,), "silent"), links.dismiss((2,), "silent")) == (True, False)


def test_a_follower_reaches_its_leader_only() -> None:
    sent: list[Any] = []
    link = leader_link(sent)
    link.send_rpc(FRAME, None)
    link.send_rpc(FRAME, 1)
    assert sent == [FRAME]
    assert (link.leads, link.skew, link.members()) == (False, 0.5, {})
    assert (link.backlog(None), link.backlog(1), link.address(1), link.dismiss((1,), "")) == (9, 0, "", False)


def test_a_single_node_reaches_none() -> None:
    links = SingleNodeLinks()
    links.send_rpc(FRAME, 1)
    assert (links.leads, links.skew, links.members()) == (True, 0.0, {})
    assert (links.backlog(None), links.address(1), links.dismiss((0,), "")) == (0, "", False)


def test_links_follow_the_role_of_a_node() -> None:
    sent: list[Any] = []
    roles: list[Any] = [leader_link(sent)]
    links = RoleLinks(lambda: roles[-1])
    links.send_rpc(FRAME, None)
    assert (links.leads, links.skew, links.members(), links.backlog(None)) == (False, 0.5, {}, 9)
    roles.append(member_links(sent))
    links.send_rpc(FRAME, 1)
    assert sent == [FRAME, (1, FRAME)]
    assert (links.leads, links.skew, links.members(), links.address(1)) == (True, 0.0, {1: (1,)}, "10.0.0.2")
    assert links.dismiss((1,), "silent")
