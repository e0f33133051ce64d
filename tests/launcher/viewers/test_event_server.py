"""Viewers of a run on one node: each event arrives once, slow viewers are dropped, broken connections are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.contract import events
from phalanx.errors import LaunchError
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.viewers import event_server, viewer, views
from tests.launcher.viewers.nodes import Node, nodes, received, run_async, until


def test_viewers_receive_past_and_new_events_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            expected = ["begins"]

            async def happen() -> None:
                for number in range(300):
                    node.note(f"note {number}")
                    node.sample()
                    expected.extend((f"note {number}", "S"))
                    await asyncio.sleep(0.001)
                node.server.end(0, 1.0)

            for number in range(2000):
                node.note(f"past {number}")
                expected.append(f"past {number}")
            happening = asyncio.create_task(happen())
            all_viewers = await asyncio.gather(*(received(views.of(node.record)) for _ in range(5)))
            await happening
            assert all_viewers == [[*expected, "end"]] * 5

    run_async(work)


def test_a_slow_viewer_loses_samples_first_and_is_dropped_later(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            with await asyncio.to_thread(node.call) as slow:
                await until(lambda: len(node.server._viewers) == 1)
                (caller,) = node.server._viewers
                await until(lambda: caller._held is None)
                for _ in range(100):
                    node.sample(1 << 16)
                    await asyncio.sleep(0)
                assert caller._transport is not None
                assert caller._transport.get_write_buffer_size() < viewer._SAMPLES_LIMIT + (1 << 17)
                node.note("something happens")  # that is not lost yet
                assert caller in node.server._viewers
                for number in range(400):
                    node.note(f"{number}" * (1 << 14))
                    await asyncio.sleep(0)
                await until(lambda: not node.server._viewers)
                # A viewer that reads receives everything.
                node.server.end(0, 1.0)
                assert (await received(views.of(node.record)))[-1] == "end"
                slow.close()

    run_async(work)


def test_the_number_of_viewers_is_limited(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(event_server, "MAX_VIEWERS", 2)
    monkeypatch.setattr(control_socket, "HANDLER_TIMEOUT", 0.2)

    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            first, second = await asyncio.to_thread(node.call), await asyncio.to_thread(node.call)
            await until(lambda: len(node.server._viewers) == 2)
            with pytest.raises(LaunchError, match="this run has 2 viewers already"):
                await received(views.of(node.record))
            first.close()
            await until(lambda: len(node.server._viewers) == 1)
            assert await received(views.of(node.record), until="begins") == ["begins"]
            second.close()

    run_async(work)


def test_silent_connections_do_not_block_the_control_socket(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            name = Path(node.folder.path, "control").read_text().split()[0]
            with contextlib.ExitStack() as held:
                silent_callers = [
                    held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(control_socket._MAX_PENDING + 20)
                ]
                for caller in silent_callers:
                    await asyncio.to_thread(caller.connect, f"\0{name}")
                assert await received(views.of(node.record), until="begins") == ["begins"]
                assert len(node.control._pending) <= control_socket._MAX_PENDING
                silent_callers[0].settimeout(10)
                assert await asyncio.to_thread(silent_callers[0].recv, 1) == b""

    run_async(work)


def test_a_viewer_reconnects_without_duplicate_events(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            seen: list[str] = []
            receiving = asyncio.create_task(received(views.of(node.record), found=seen))
            for number in range(3):
                await until(lambda: bool(node.server._viewers))
                node.note(f"before {number}")
                await until(lambda word=f"before {number}": word in seen)  # type: ignore[misc]
                node.server._drop_all()
                node.note(f"meanwhile {number}")
            await until(lambda: bool(node.server._viewers))
            await until(lambda: "meanwhile 2" in seen)
            node.server._drop_all()
            # The ranks of many nodes have the time of their sample, which is complete some seconds later.
            node.folder.event(events.NoteEvent(time=time.time() - 5, text="late"))
            await until(lambda: "late" in seen)
            node.server.end(3, 1.0)
            words = [f"{word} {number}" for number in range(3) for word in ("before", "meanwhile")]
            assert await receiving == ["begins", *words, "late", "end"]

    run_async(work)


def test_a_disconnected_viewer_reads_the_rest_from_the_files(tmp_path: Path) -> None:
    async def work() -> None:
        async with nodes(tmp_path) as (node,):
            source = views.of(node.record)
            seen: list[str] = []
            receiving = asyncio.create_task(received(source, found=seen))
            await until(lambda: bool(node.server._viewers))
            node.note("received")
            await until(lambda: "received" in seen)
            os.unlink(os.path.join(node.folder.path, "control"))
            node.server.close()
            node.note("missed")
            node.folder.event(events.RunEnded(time=time.time(), code=1, seconds=1.0))
            node.folder.ended(1)
            assert await receiving == ["begins", "received", "missed", "end"]

    run_async(work)


@pytest.mark.parametrize("waiting", [0, 1], ids=["stopped", "stopped, and others wait"])
def test_a_viewer_can_leave_while_the_agent_is_stopped(tmp_path: Path, waiting: int) -> None:
    node = Node(tmp_path / "run")
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        name = f"phalanx-test-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen(0)
        for _ in range(waiting):
            held.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        (tmp_path / "run" / "control").write_text(f"{name} key\n")

        async def look() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(received(views.of(node.record)), 0.3)

        began = time.monotonic()
        asyncio.run(look())
        assert time.monotonic() - began < control_socket.HANDLER_TIMEOUT - 1
    node.folder.close()
