"""An address and a port, and whether a process listens there."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

CONNECT_TIMEOUT = 3.0  # seconds
STEADILY = 0.5  # seconds for which a live leader keeps a connection


class Endpoint(NamedTuple):
    """An address and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def answers(endpoint: Endpoint, *, steadily: float = 0.0) -> bool:
    """Return whether a process listens there.

    `steadily`: it must keep the connection for so many seconds. A process that is being killed loses its connections a
    moment before it stops listening.
    """
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*endpoint), CONNECT_TIMEOUT)
    except OSError:
        return False
    try:
        if steadily:
            await asyncio.wait_for(reader.read(1), steadily)
            return False
    except TimeoutError:
        pass
    except OSError:
        return False
    finally:
        writer.close()
    return True
