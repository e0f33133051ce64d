"""The interface of the agent for the watchers of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phalanx.errors import PhalanxError
    from phalanx.launcher.ipc.control_socket import ControlSocket
    from phalanx.launcher.ipc.node_links import NodeLinks
    from phalanx.launcher.ipc.node_rpc import NodeRpc
    from phalanx.launcher.plan import Plan
    from phalanx.launcher.runs.run_folder import RunFolder
    from phalanx.launcher.workers.worker_group import WorkerGroup


class WatchedAgent(Protocol):
    """The agent, as far as the watchers of its workers need it."""

    all_joined: bool  # every node has joined

    @property
    def plan(self) -> Plan:
        """Return the current plan."""
        ...

    @property
    def attempt(self) -> WorkerGroup | None:
        """Return the worker group of the current attempt."""
        ...

    def note(self, text: str, *, repeats: bool = False) -> None:
        """Print a line and write it to the run folder."""

    def say(self, text: str) -> None:
        """Print a line."""

    def fail(self, error: PhalanxError) -> None:
        """End the run with this error."""


@dataclass(frozen=True)
class WatchContext:
    """What the watchers of the workers use: the agent, other nodes, callers on this node, the run folder."""

    agent: WatchedAgent
    links: NodeLinks
    rpc: NodeRpc
    control: ControlSocket
    folder: RunFolder
