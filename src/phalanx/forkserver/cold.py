"""The fork server of one run: the interpreter of the script itself, paused before its main module."""

from __future__ import annotations

import os
import socket

from . import linux, log
from .probe import probe
from .server import ForkServer


def serve(fd: int, parent: int) -> None:
    """Serve the agent. Returns in a worker only."""
    # Until the imports are done, no process reads the socket, and there is nothing to clean up.
    linux.die_with_parent(parent)
    log.configure()
    os.set_inheritable(fd, False)
    probe.prepare()
    ForkServer(socket.socket(fileno=fd)).serve()
