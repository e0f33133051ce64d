"""The agent, as far as those need it who watch its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phalanx.errors import PhalanxError
    from phalanx.launcher.agent.worker_group import WorkerGroup
    from phalanx.launcher.plan import Plan


class WatchedAgent(Protocol):
    all_joined: bool  # every node has joined

    @property
    def plan(self) -> Plan: ...

    @property
    def attempt(self) -> WorkerGroup | None: ...

    def note(self, text: str, *, repeats: bool = False) -> None: ...

    def say(self, text: str) -> None: ...

    def fail(self, error: PhalanxError) -> None: ...
