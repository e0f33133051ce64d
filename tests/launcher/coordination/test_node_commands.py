"""In which order a decision reaches the members."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from phalanx.control import messages
from phalanx.control.leader.members import JoinedMember, Members
from phalanx.control.leader.roster import Roster
from phalanx.control.messages import PeerList, Regroup
from phalanx.launcher.coordination.leader.member_states import MemberStates
from phalanx.launcher.coordination.leader.node_commands import NodeCommands
from tests.control.parties import arrival


def test_all_members_get_their_ranks_before_one_gets_a_peer_list() -> None:
    sent: list[tuple[int, type]] = []

    async def write(member: JoinedMember) -> None:
        async def send(content: bytes) -> None:
            sent.append((member.id, type(messages.from_leader.decode(content))))

        await member.outbox.send_all(send)

    async def regroup() -> None:
        roster = Roster(4)
        members, states = Members(roster), MemberStates(roster, 0)
        for number in range(4):
            assert roster.admit(arrival(number)) == number
        for number in (1, 2, 3):
            info = roster.members[number]
            members.add(JoinedMember(number, info, "127.0.0.1", "127.0.0.1", asyncio.BaseTransport()))
        states.start_attempt(members.connected)
        context: Any = SimpleNamespace(plan=None, rendezvous=SimpleNamespace(elastic=True))
        output: Any = SimpleNamespace(ranks_assigned=lambda *_: None)
        commands = NodeCommands(context, members, states, output)
        commands._assign_ranks = lambda: None  # type: ignore[method-assign]
        writers = [asyncio.create_task(write(member)) for member in members.connected.values()]
        await asyncio.sleep(0)  # they wait for messages
        with socket.socket() as store:
            store.bind(("127.0.0.1", 0))
            commands._store = store
            commands.regroup(1, "node 4 is lost", halt=False)
            for member in members.connected.values():
                asyncio.get_running_loop().call_later(0.01, member.outbox.end)
            await asyncio.gather(*writers)

    asyncio.run(regroup())
    assert sent == [(member, kind) for kind in (Regroup, PeerList) for member in (1, 2, 3)]
