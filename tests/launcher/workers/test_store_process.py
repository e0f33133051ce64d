"""The store of a node and the fork servers that start it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.launcher.workers.store_process import StoreProcess
from phalanx.launcher.workers.workers import Workers


class ForkServer:
    """Records the orders for a store; a lost one accepts none."""

    forks = is_child = True

    def __init__(self) -> None:
        self.lost = False
        self.orders = 0

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.lost:
            raise BrokenPipeError
        self.orders += message["do"] == "store" and len(fds) > 0


def test_a_store_that_ends_while_there_is_no_fork_server_is_started_by_the_next_one(tmp_path: Path) -> None:
    async def ends() -> None:
        first, second = ForkServer(), ForkServer()
        server: Any = first
        workers = Workers(server)
        plan: Any = SimpleNamespace(
            group=SimpleNamespace(master_addr="127.0.0.1", master_port=1),
            recovery=SimpleNamespace(worker_timeout=60.0),
            rendezvous=None,
            environ={},
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store = StoreProcess(
                plan,
                listener,
                workers,
                folder=RunFolder(str(tmp_path)),
                note=lambda _: None,
                over=asyncio.Event(),
                peers=None,
            )
            store.prepare()
            store.started(4711)
            first.lost = True
            assert store.exited(4711, -signal.SIGKILL)
            workers.fork_server = second  # type: ignore[assignment]
            store.use_fork_server()
            assert (first.orders, second.orders) == (1, 1)
            store.started(4712)
            store.use_fork_server()  # this one lives
            assert second.orders == 1
            store.close()

    asyncio.run(ends())
