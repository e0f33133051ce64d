"""Viewers on a node that does not lead: events and logs come from the other nodes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.errors import LaunchError
from phalanx.launcher.ipc.control_messages import SearchReply
from phalanx.launcher.ipc.node_rpc import RequestHandler
from phalanx.launcher.viewers import event_server, log_queries, views
from phalanx.watch.source import SearchResult
from tests.launcher.viewers.nodes import Node, nodes, received, run_async, until


def replies(content: bytes | None) -> RequestHandler:
    async def reply(_: int | None, __: bytes) -> bytes | None:
        return content

    return reply


def test_invalid_replies_of_one_node_do_not_hide_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    async def work() -> None:
        async with nodes(tmp_path, 4) as (leader, one, _, broken):
            for content in (
                b"[1]",
                b'{"reply": "search", "found": 5}',
                b'{"reply": "search", "found": [{"rank": "0"}]}',
                b'{"reply": "why"}',
                b"[" * 9999,
            ):
                broken.rpc.serve("query", replies(content))
                for node in (leader, one):
                    source = views.of(node.record)
                    found = await source.search("speaks")
                    assert [line.rank for line in found if line.rank >= 0] == [0, 1, 2]
                    with pytest.raises(LaunchError):
                        await source.log(3, "stdout")
            lie = SearchResult(rank=0, stream="stdout", at=0, line="speaks as another")
            broken.rpc.serve("query", replies(msgspec.json.encode(SearchReply(found=(lie,)))))
            assert [line.line for line in await views.of(leader.record).search("speaks")] == [
                f"rank {rank} speaks" for rank in range(3)
            ]
            broken.rpc.serve("query", replies(None))
            monkeypatch.setattr(log_queries, "NODE_TIMEOUT", 1.0)
            *found, note = await views.of(one.record).search("speaks")  # node 0 waits as well
            assert [line.rank for line in found] == [0, 1, 2]
            assert note.line == "node 3 has not answered within 1 s"

    run_async(work)


def test_viewers_of_a_member_receive_the_events_of_the_leader(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)
    monkeypatch.setattr(event_server, "_EXPIRES", 5.0)  # a loaded machine may need seconds for the rest of this test

    async def work() -> None:
        async with nodes(tmp_path, 3) as (leader, one, _):
            for number in range(5000):
                leader.note(f"past {number}")
            several = [asyncio.create_task(received(views.of(one.record))) for _ in range(3)]
            await until(lambda: len(one.server._viewers) == 3 and 1 in leader.server._members)
            assert list(leader.server._members) == [1]  # regardless of its number of viewers
            one.note("not for those who look at the whole")
            leader.note("now")
            for number in range(3):
                source = views.of(leader.others.get(number, leader).record)
                for rank in range(3):
                    part = await source.log(rank, "stdout")
                    assert (part.start, part.text) == (0, f"rank {rank} speaks\n")
                assert [line.rank for line in await source.search("SPEAKS")] == [0, 1, 2]
                assert await source.search("rank 2", [0, 1]) == []
                assert (await source.log(7, "stdout")).text == ""
            leader.server.end(0, 1.0)
            words = ["begins", *(f"past {number}" for number in range(5000)), "now", "end"]
            for task in several:
                assert await task == words
            await until(lambda: not one.server._viewers)
            await until(lambda: not leader.server._members)
            # A dead one leaves nothing behind: a subscription that is not renewed expires.
            leader.server._members[2] = time.monotonic() + 0.1
            await asyncio.sleep(0.15)
            leader.note("later")
            assert not leader.server._members

    run_async(work)


def test_a_member_that_was_stopped_receives_what_it_missed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)

    async def work() -> None:
        async with nodes(tmp_path, 2) as (leader, one):
            seen: list[str] = []
            receiving = asyncio.create_task(received(views.of(one.record), found=seen))
            await until(lambda: 1 in leader.server._members and bool(one.server._leader))
            leader.server._members.clear()  # it was stopped for longer than its subscription is valid
            leader.note("missed")
            await until(lambda: 1 in leader.server._members and "missed" in seen)
            leader.server.end(0, 1.0)
            assert await receiving == ["begins", "missed", "end"]

    run_async(work)


def test_the_stream_continues_after_a_failover(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)

    async def work() -> None:
        async with nodes(tmp_path, 3) as (leader, heir, other):
            seen: dict[Node, list[str]] = {heir: [], other: []}
            receiving = [asyncio.create_task(received(views.of(node.record), found=seen[node])) for node in seen]
            await until(lambda: len(leader.server._members) == 2)
            await until(lambda: all(not caller._held for node in (heir, other) for caller in node.server._viewers))
            leader.note("the last of the first")
            await until(lambda: all("the last of the first" in words for words in seen.values()))
            heir.leads, heir.leader, other.leader = True, heir, heir
            leader.others, heir.others = {}, {2: other}
            heir.note("the first of the second")
            await until(lambda: 2 in heir.server._members)
            heir.note("and more")
            await until(lambda: all("and more" in words for words in seen.values()))
            heir.server.end(0, 1.0)
            for task in receiving:
                states = await task
                assert [word for word in states if word != "begins"] == [
                    "the last of the first",
                    "the first of the second",
                    "and more",
                    "end",
                ]

    run_async(work)


def test_a_node_that_has_not_joined_shows_its_own_events(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "_RENEW_INTERVAL", 0.05)

    async def work() -> None:
        async with nodes(tmp_path, 2) as (leader, node):
            node.all_joined = False
            leader.note("long ago")
            seen: list[str] = []
            receiving = asyncio.create_task(received(views.of(node.record), found=seen))
            await until(lambda: bool(node.server._viewers))
            node.note("waits for node 0")
            await until(lambda: "waits for node 0" in seen)
            node.all_joined = True
            await until(lambda: bool(leader.server._members))
            leader.server.end(0, 1.0)
            assert await receiving == ["begins", "waits for node 0", "begins", "long ago", "end"]

    run_async(work)
