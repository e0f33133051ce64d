"""Which nodes a leader admits, and what both sides report if it refuses one."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from phalanx.control.endpoint import Endpoint
from phalanx.control.member import member
from phalanx.control.member.member import Member
from phalanx.errors import JoinError
from tests.control.parties import OTHER, TOKEN, MemberEvents, arrival, joined, leading, until

ANOTHER_TOKEN = (
    f"a different token than ours, which is from a test (fingerprint {TOKEN.fingerprint}): "
    "copy our token file there, or set PHALANX_TOKEN to the same value on both"
)


def test_the_timeout_names_rejected_nodes() -> None:
    async def meet() -> None:
        async with leading() as led:
            with pytest.raises(JoinError):
                async with joined(led.port, token=OTHER):
                    pass
            with pytest.raises(JoinError) as missed:
                await led.leader.wait_for_members(0.1)
            assert missed.value.details[2:] == (f"rejected: 127.0.0.1: {ANOTHER_TOKEN}",)
            token = "copy our token file there, or set PHALANX_TOKEN to the same value on both"
            assert missed.value.fix == f"{token}; then start it there again"

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("changes", "what", "noted"),
    [
        ({"run": "other"}, "leads another run", "it belongs to the run other, this is mine"),
        ({"member": 0}, "node 0 of this run is already there: host0, pid 100", "node 0 is taken by host0, pid 100"),
        ({"member": 5}, "would not start what", "it has node 5, node 0 has 2 nodes"),
        ({"terms": {"script": "b"}}, "would not start what", "it has script: b, node 0 has script: a"),
        ({"versions": {"torch": "1.0"}}, "has other versions than", "it has torch 1.0, node 0 has torch 2.9"),
        ({"slots": 4}, "has 4 workers, but 2 workers were expected", "it has 4 workers, but 2 workers were expected"),
        ({"trouble": "there is no GPU"}, "there is no GPU", "there is no GPU"),
        ({"terms": {"x": "y" * 300}}, "refuses this node", "Expected `str` of length <= 256"),
    ],
)
def test_a_refusal_names_what_differs(changes: dict[str, object], what: str, noted: str) -> None:
    async def meet() -> None:
        own = arrival(0, run="mine", slots=1, terms={"script": "a"}, versions={"torch": "2.9"})
        async with leading(own=own, promised=(1, 2)) as led:
            began = time.monotonic()
            with pytest.raises(JoinError) as refused:
                async with joined(led.port, **{"member": 1, "slots": 2, **changes}):  # type: ignore[arg-type]
                    pass
            assert time.monotonic() - began < 15  # no wait for a timeout
            assert what in refused.value.what
            assert [note for note in led.events.notes if noted in note], led.events.notes
            with pytest.raises(JoinError) as missed:
                await led.leader.wait_for_members(0.1)
            fix = refused.value.fix or "see why it was rejected"  # node 0 and the rejected node show the same fix
            assert missed.value.fix == f"{fix}; then start it there again"
            assert not led.ids

    asyncio.run(meet())


def test_a_leader_with_another_number_of_workers_than_promised_fails() -> None:
    async def meet() -> None:
        with pytest.raises(JoinError, match="it has 1 worker, but 4 workers were expected"):
            async with leading(promised=(4, 4)):
                pass

    asyncio.run(meet())


def test_a_node_that_cannot_take_part_declines() -> None:
    async def meet() -> None:
        async with leading() as led:
            where = [Endpoint("127.0.0.1", led.port)]
            await Member(TOKEN, arrival(1, trouble="no GPU"), lambda: where, events=MemberEvents()).decline()
            assert led.events.notes == ["host1 at 127.0.0.1 was rejected: no GPU"]

    asyncio.run(meet())


def test_a_warning_is_shown_on_both_sides() -> None:
    async def meet() -> None:
        own = arrival(0, versions={"torch": "2.9"})
        async with leading(own=own) as led, joined(led.port, versions={"torch": "2.11"}) as (one, _):
            assert list(one.connection.welcome.notes) == led.events.notes == ["host1 has torch 2.11, host0 2.9"]

    asyncio.run(meet())


def test_escape_sequences_in_a_host_name_are_quoted() -> None:
    async def meet() -> None:
        own = arrival(0, versions={"torch": "2.9"})
        odd = {"host": "gpu\x1b]0;mine\x07\nphalanx: all is well", "versions": {"torch": "2.\x9b2J"}}
        async with leading(own=own) as led, joined(led.port, **odd):
            assert led.events.notes == ["gpu\\x1b]0;mine\\x07\\nphalanx: all is well has torch 2.\\x9b2J, host0 2.9"]
            assert led.members.name(1).isprintable()

    asyncio.run(meet())


def test_another_token_is_rejected() -> None:
    async def meet() -> None:
        async with leading() as led:
            with pytest.raises(JoinError) as refused:
                async with joined(led.port, token=OTHER):
                    pass
            assert "does not know this node's token" in refused.value.what
            details = "\n".join(refused.value.details)
            assert TOKEN.fingerprint in details
            assert OTHER.fingerprint in details
            assert led.events.notes == [f"127.0.0.1 was rejected: {ANOTHER_TOKEN}"]

    asyncio.run(meet())


@pytest.mark.parametrize("host", ["", "no such host", "fe80::1%lo", "[", "a" * 300, "127.0.0.1"])
def test_invalid_addresses_raise_join_errors(host: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = [Endpoint(host, sock.getsockname()[1])]

        async def meet() -> None:
            with pytest.raises(JoinError):
                await Member(TOKEN, arrival(1), lambda: where, events=MemberEvents()).join(0.1)

        asyncio.run(meet())


def test_a_name_that_does_not_resolve_yet_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may be published later, as for a pod. Only the join timeout limits the wait."""
    monkeypatch.setattr(member, "_SETTLED", 0.0)

    async def meet() -> None:
        where = [Endpoint("phalanx-nobody.invalid", 29400)]
        events = MemberEvents()
        one = Member(TOKEN, arrival(1), lambda: where, events=events)
        joining = asyncio.create_task(one.join(60))
        await until(lambda: len(events.waits) >= 3)
        assert all('"phalanx-nobody.invalid" of the leader does not resolve here' in text for text in events.waits)
        async with leading() as led:
            where[:] = [Endpoint("127.0.0.1", led.port)]
            assert (await joining).member == 1
            await one.leave(0, "")

    asyncio.run(meet())
