"""The connection to one fork server: imports, requests, loss and end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from phalanx.forkserver import wire
from phalanx.launcher.forking.connection import ForkServerConnection
from phalanx.launcher.forking.fork_servers import ForkServerClient

READY = {"is": "ready", "pid": 7, "seconds": {}}


class Server:
    """The other side of the connection, in this process."""

    def __init__(self, ready: wire.Message | None = None) -> None:
        ours, self._sock = socket.socketpair()
        self.received: list[Any] = []
        self.connection = ForkServerConnection(
            ForkServerClient(ours, "warm", ready=ready),
            self.received.append,
            lambda: self.received.append("lost"),
            timeout=60.0,
        )

    def send(self, message: wire.Message) -> None:
        wire.send(self._sock, message, [])

    def request(self) -> wire.Message:
        received = wire.receive(self._sock)
        assert received is not None
        return received[0]

    def close(self) -> None:
        self._sock.close()


def run_scene(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))


def test_imports_are_waited_for_and_messages_about_processes_passed_on() -> None:
    async def scene() -> None:
        server = Server()
        server.send({"is": "started", "name": "0", "pid": 8})
        server.send(READY)
        assert await server.connection.ready() == READY
        assert server.received == [{"is": "started", "name": "0", "pid": 8}]
        assert await Server(ready=READY).connection.ready() == READY

    run_scene(scene)


@pytest.mark.parametrize("end", ["stop_waiting", "close"])
def test_a_wait_for_imports_ends_without_a_report(end: str) -> None:
    async def scene() -> None:
        server = Server()
        waiting = asyncio.create_task(server.connection.ready())
        await asyncio.sleep(0)
        server.close() if end == "close" else server.connection.stop_waiting()
        assert await waiting == {}
        assert server.connection.lost == ("unknown" if end == "close" else "")

    run_scene(scene)


def test_a_request_has_an_answer_which_is_empty_if_the_fork_server_is_lost() -> None:
    async def scene() -> None:
        server = Server(ready=READY)
        await server.connection.ready()
        asking = asyncio.create_task(server.connection.ask("orphans"))
        await asyncio.sleep(0)
        assert server.request() == {"do": "orphans", "id": 1}
        server.send({"is": "orphans", "id": 1, "pids": [9]})
        assert await asking == {"is": "orphans", "id": 1, "pids": [9]}
        asking = asyncio.create_task(server.connection.ask("end_orphans"))
        await asyncio.sleep(0)
        server.close()
        assert await asking == {}
        assert server.received == ["lost"]
        assert await server.connection.ask("end_orphans") == {}

    run_scene(scene)


@pytest.mark.parametrize(("left", "ended"), [([], True), ([9], False)])
def test_it_ends_on_request(left: list[int], ended: bool) -> None:
    async def scene() -> None:
        server = Server(ready=READY)
        await server.connection.ready()
        ending = asyncio.create_task(server.connection.end(leave=True))
        await asyncio.sleep(0)
        assert server.request() == {"do": "end", "leave": True}
        server.send({"is": "exited", "name": "0"})
        server.send({"is": "ended", "left": left})
        await ending
        assert server.connection.ended is ended
        assert not server.connection.lost
        assert server.received == []
        await server.connection.end()  # once more does nothing

    run_scene(scene)
