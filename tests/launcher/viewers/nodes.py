"""Agents with an event server, as far as viewers need them, and viewers that list what they receive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from phalanx.contract import events
from phalanx.control import messages
from phalanx.forkserver import linux
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import WatchQuery
from phalanx.launcher.ipc.control_socket import ControlSocket
from phalanx.launcher.ipc.node_rpc import NodeRpc
from phalanx.launcher.runs.run_folder import RunFolder, RunRecord
from phalanx.launcher.viewers.event_server import EventServer
from phalanx.launcher.workers.watched import WatchContext


class Node:
    """An agent from the perspective of its viewers. Messages to other nodes arrive a moment later."""

    def __init__(self, folder: Path, *, leads: bool = True, ranks: tuple[int, ...] = ()) -> None:
        folder.mkdir()
        self.folder = RunFolder(str(folder))
        self.leads = leads
        self.all_joined = True
        self.attempt: Any = None
        self.leader: Node = self
        self.others: dict[int, Node] = {}
        self.number = 0
        self.ranks = ranks
        self.rpc = NodeRpc(cast("Any", self))
        pid = os.getpid()
        self.record = RunRecord(
            id="run",
            pid=pid,
            pid_started=linux.start_time(pid) or 0,
            command=["train.py"],
            cwd="/",
            folder=str(folder),
            world_size=1,
            started=time.time(),
        )
        self.folder.record(self.record)
        self.note("begins")
        for rank in ranks:
            place = Path(self.folder.rank_folder(0, str(rank)))
            (place / "stdout.log").write_text(f"rank {rank} speaks\n")

    def open(self) -> None:
        self.control = ControlSocket(self.folder)
        here = cast("Any", self)
        self.server = EventServer(WatchContext(here, here, self.rpc, self.control, self.folder))

    def close(self) -> None:
        self.control.close()
        self.server.close()
        self.folder.close()

    def note(self, text: str) -> None:
        self.folder.event(events.NoteEvent(time=time.time(), text=text))

    def sample(self, size: int = 0) -> None:
        samples = (events.RankSample(rank=0, place="x" * size),)
        self.folder.sample(events.ClusterSample(time=time.time(), seconds=1.0, ranks=samples))

    def call(self, since: float | None = None) -> Any:
        return control_socket.call(self.record, WatchQuery(since=since))

    # -- Carrier

    def members(self) -> dict[int, tuple[int, ...]]:
        return {number: node.ranks for number, node in self.others.items()}

    def backlog(self, to: int | None) -> int:
        return 0

    def send_rpc(self, frame: messages.RpcFrame, to: int | None) -> None:
        node, who = (self.others[to], None) if to is not None else (self.leader, self.number)
        asyncio.get_running_loop().call_soon(node.rpc.receive, who, frame)


@contextlib.asynccontextmanager
async def nodes(folder: Path, count: int = 1) -> AsyncIterator[list[Node]]:
    made = [Node(folder / f"run_{number}", leads=number == 0, ranks=(number,)) for number in range(count)]
    for number, node in enumerate(made):
        node.number, node.leader = number, made[0]
        if number:
            made[0].others[number] = node
        node.open()
    try:
        yield made
    finally:
        for node in made:
            node.close()


def run_async(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(240):
            await work()

    asyncio.run(bounded())


async def received(source: Any, *, until: str = "", found: list[str] | None = None) -> list[str]:
    """The notes, in order; S: a sample. `found` has those so far."""
    found = [] if found is None else found
    async for event in source.events():
        found.append(
            event.text
            if isinstance(event, events.NoteEvent)
            else "S"
            if isinstance(event, events.ClusterSample)
            else "end"
        )
        if until and found[-1] == until:
            break
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
