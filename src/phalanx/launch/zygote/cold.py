"""The zygote of one run: the interpreter of the script itself, paused before its main module."""

from __future__ import annotations

import os
import socket

from . import kernel
from .nursery import Nursery
from .witness import witness


def serve(fd: int, parent: int) -> None:
    """Returns in a worker only."""
    # Until the imports are done nobody listens to the socket, and there is nothing to tidy up.
    kernel.die_with_parent(parent)
    os.set_inheritable(fd, False)
    witness.prepare()
    Nursery(socket.socket(fileno=fd)).serve()
