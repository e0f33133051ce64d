"""An address and a port, and whether a process listens there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal, NamedTuple

CONNECT_TIMEOUT = 3.0  # seconds
STEADILY = 0.5  # seconds for which a live leader keeps a connection


# "closed": its host has rejected the connection, so the process has ended. "unreachable": nothing is known about it.
ProbeResult = Literal["listens", "closed", "unreachable"]


class Endpoint(NamedTuple):
    """An address and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def probe(endpoint: Endpoint, *, steadily: float = 0.0) -> ProbeResult:
    """Return whether a process listens there.

    `steadily`: it must keep the connection for this many seconds. A process that is being killed loses its
    connections a moment before it stops listening.
    """
    if not endpoint.port:
        return "unreachable"
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), CONNECT_TIMEOUT)
    except ConnectionRefusedError:
        return "closed"
    except OSError:  # a timeout, too
        return "unreachable"
    try:
        if steadily:
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(1), steadily)
            return "closed"
    except TimeoutError:
        pass
    except OSError:
        return "unreachable"
    finally:
        writer.close()
    return "listens"


async def answers(endpoint: Endpoint, *, steadily: float = 0.0) -> bool:
    """Return whether a process listens there, as `probe` does."""
    return await probe(endpoint, steadily=steadily) == "listens"
