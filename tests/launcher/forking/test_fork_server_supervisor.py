"""The fork server of a run: failed imports, imports that cannot be forked, and replacements of a killed one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import LaunchError
from phalanx.forkserver import wire
from phalanx.launcher.command import Command
from phalanx.launcher.forking import fork_servers
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.supervisor import ForkServerSupervisor
from phalanx.launcher.runs.run_folder import RunFolder

READY = {"is": "ready", "pid": 7, "seconds": {"torch": 1.5, "os": 0.0}}
PLAN: Any = SimpleNamespace(
    recovery=SimpleNamespace(worker_timeout=60.0),
    environ={},
    start=SimpleNamespace(preload=("mine",)),
    command=Command("script", "/nowhere/train.py", (), "python"),
)


class Server(ForkServerClient):
    """A simulated fork server: it reports once, and ends on request."""

    def __init__(self, mode: str, report: wire.Message) -> None:
        ours, self.theirs = socket.socketpair()
        super().__init__(ours, mode)
        wire.send(self.theirs, report, [])

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        assert (message["do"], fds) == ("end", ())
        wire.send(self.theirs, {"is": "ended", "left": []}, [])

    @property
    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.sock.close()
        self.theirs.close()


class Run:
    """A supervisor of simulated fork servers."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers: list[Server] = []
        self.folders: list[RunFolder] = []
        self.events: list[Any] = []
        self.notes: list[str] = []
        self.lost = 0
        self.ending = False
        self.next: wire.Message = READY  # what the next fork server reports
        self._path = tmp_path
        monkeypatch.setattr(fork_servers, "fresh", lambda *_, **__: self.client("fresh"))
        monkeypatch.setattr(fork_servers, "make", lambda *_, **__: self.client("cold"))

    def client(self, mode: str) -> Server:
        self.servers.append(Server(mode, self.next))
        return self.servers[-1]

    def supervisor(self) -> ForkServerSupervisor:
        folder = RunFolder(str(self._path))
        folder.event = self.events.append  # type: ignore[method-assign]
        self.folders.append(folder)
        hints: Any = SimpleNamespace(modules=(), refuse=lambda: None)
        return ForkServerSupervisor(
            self.client("cold"),
            PLAN,
            hints,
            folder=folder,
            note=self.notes.append,
            is_ending=lambda: self.ending,
            foreign_pids=frozenset,
            on_message=lambda _: None,
            on_lost=lambda: setattr(self, "lost", self.lost + 1),
        )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch)
    yield made
    for server in made.servers:
        server.close()
    for folder in made.folders:
        folder.close()


def run_scene(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 10))


def test_what_imports_printed_is_shown_once(run: Run, tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "forkserver.log").write_text("a warning\n")
        supervisor = run.supervisor()
        assert await supervisor.wait_until_ready()
        assert run.notes == ["while importing:\n  a warning"]
        assert run.events[0].imports == {"torch": 1.5}
        assert await supervisor.replace(PLAN)
        assert len(run.notes) == 1

    run_scene(scene)


@pytest.mark.parametrize("report", [{"failed": {"torch": "no module"}}, {"unsafe": "a thread runs"}])
def test_ranks_are_new_interpreters_where_forking_is_not_safe(run: Run, report: wire.Message) -> None:
    async def scene() -> None:
        run.next = READY | report
        supervisor = run.supervisor()
        run.next = READY
        assert await supervisor.wait_until_ready()
        assert [server.mode for server in run.servers] == ["cold", "fresh"]
        assert supervisor.client.mode == "fresh"
        assert supervisor.hints is None
        assert "every rank gets its own interpreter" in run.notes[0]

    run_scene(scene)


def test_a_module_of_the_user_must_exist(run: Run) -> None:
    async def scene() -> None:
        run.next = READY | {"failed": {"mine": "no module"}}
        with pytest.raises(LaunchError, match="--preload mine cannot be imported: no module"):
            await run.supervisor().wait_until_ready()

    run_scene(scene)


def test_a_killed_one_is_replaced_unless_the_run_ends(run: Run) -> None:
    async def scene() -> None:
        supervisor = run.supervisor()
        assert await supervisor.wait_until_ready()
        run.servers[0].theirs.close()
        await asyncio.sleep(0.05)
        assert run.lost == 1
        assert supervisor.lost == "unknown"
        assert "ended while it imported torch: unknown" in supervisor.startup_error().what
        run.ending = True
        assert not await supervisor.replace(PLAN)
        run.ending = False
        assert await supervisor.replace(PLAN)
        assert supervisor.lost == ""
        assert [server.mode for server in run.servers] == ["cold", "cold"]

    run_scene(scene)
