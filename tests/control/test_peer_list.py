"""The list of members, which the leader sends to all members at each change."""

from __future__ import annotations

import asyncio

from phalanx.contract.ranks import number_ranges
from phalanx.contract.ranks.placement import MAX_NODES
from phalanx.control import messages
from phalanx.control.leader.members import SUCCESSORS, JoinedMember, Members
from phalanx.control.leader.roster import Roster
from tests.control.parties import arrival


def test_it_names_all_members_and_does_not_grow_with_their_number() -> None:
    async def make() -> None:
        members = Members(Roster(4096))
        members.admit_leader(arrival(0))
        for number in range(1, 4096):
            assert members.roster.admit(arrival(number)) == number
            members.add(JoinedMember(number, arrival(number), "10.0.0.1", "10.0.0.0", asyncio.BaseTransport()))
        for lost in (7, 2000):
            members.roster.remove(lost)
        working = set(range(4000))
        found = members.peer_list(0, working)
        assert len(messages.encode(found)) < 8192
        assert [peer.member for peer in found.successors] == [*range(1, 7), *range(8, SUCCESSORS + 2)]
        assert number_ranges.decode(found.working, MAX_NODES) == working - {0, 7, 2000}
        assert number_ranges.decode(found.spares, MAX_NODES) == set(range(4000, 4096))

    asyncio.run(make())
