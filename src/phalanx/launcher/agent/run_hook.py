"""The interface of components beside the agent: the ssh session that started this node, or chaos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from phalanx.launcher.workers.watched import WatchedAgent

if TYPE_CHECKING:
    import socket

    from phalanx.launcher.forking.fork_servers import ForkServerClient


class HookedAgent(WatchedAgent, Protocol):
    """The agent, as far as a hook needs it."""

    @property
    def fork_server(self) -> ForkServerClient:
        """Return the current fork server."""
        ...


class RunHook(Protocol):
    """Takes part in a run beside the agent."""

    @property
    def pids(self) -> frozenset[int]:
        """Return the children of this process that the agent must not end."""
        ...

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        """Take the sockets on which node 0 listens, before anything is started."""

    def begin(self, agent: HookedAgent) -> None:
        """Begin, once the agent's event loop runs."""

    async def end(self, code: int) -> None:
        """End, after the run is over and the coordinator closed."""

    def hurry(self) -> None:
        """Stop waiting for other nodes to end, because a signal asks for the end of the run."""


class NoHook:
    """The hook of a run without such a component."""

    pids: frozenset[int] = frozenset()

    def opened(self, sockets: Sequence[socket.socket]) -> None:
        """Do nothing."""

    def begin(self, agent: HookedAgent) -> None:
        """Do nothing."""

    async def end(self, code: int) -> None:
        """Do nothing."""

    def hurry(self) -> None:
        """Do nothing."""
