"""Ports for options that need a number: no other test, and no connection of the system, takes one in the meantime.

A port that was free a moment ago may be the next one that the kernel gives to a connection or to a server without a
fixed port. These are below the range of the kernel, and every test process has its own share of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

FIRST, SHARE, SHARES = 12000, 160, 100  # up to 27999: below 29500, which launchers use by default, and below 32768
_held: dict[int, tuple[socket.socket, Iterator[int]]] = {}  # process -> the socket that marks its share, and its ports


def claim() -> None:
    """Reserve a share for this process, until it ends. A name in the abstract namespace is unique on a host."""
    for number in range(SHARES):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0phalanx-test-ports-{number}")
        except OSError:
            mark.close()
            continue
        first = FIRST + number * SHARE
        _held[os.getpid()] = mark, itertools.cycle(range(first, first + SHARE))
        return
    raise AssertionError(f"{SHARES} processes run tests on this host")


def free_port() -> int:
    """Return a port of this process's share on which no process listens; not one of the last ones."""
    if os.getpid() not in _held:
        claim()
    for port in itertools.islice(_held[os.getpid()][1], SHARE):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise AssertionError("every port of this process's share is in use")
