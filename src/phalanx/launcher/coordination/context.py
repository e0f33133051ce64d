"""The components of a coordinator for several nodes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launcher.output.console.console import Console
from phalanx.launcher.plan import Plan
from phalanx.launcher.rendezvous_config import RendezvousConfig
from phalanx.launcher.runs.run_folder import RunFolder


@dataclass(frozen=True)
class NodeContext:
    """The plan of this node, its rendezvous with the others, and its output."""

    plan: Plan
    rendezvous: RendezvousConfig
    folder: RunFolder
    console: Console
    sockets: Sequence[socket.socket]  # on which this node listens if it leads, now or later

    @property
    def port(self) -> int:
        """Return the port on which this node listens as leader. 0 if it never leads."""
        return int(self.sockets[0].getsockname()[1]) if self.sockets else 0
