"""A proxy between a member and its leader, which acts as an attacker on the network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class RecordingProxy:
    """Relays between a member and its leader: records the traffic, changes it, and cuts connections."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []  # data of the members, by connection
        self.downstream = bytearray()  # data of the leader
        self.changes = {"up": False, "down": False}  # flip a bit in the next data of the members, or of the leader
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def between(self, port: int, own: int = 0) -> AsyncIterator[None]:
        """Listen at another port, and relay to the leader at this port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            number = len(self.seen)
            self.seen.append(b"")

            def up(data: bytes) -> None:
                self.seen[number] += data

            self._writers |= {writer, back}
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(
                    self._pump(reader, back, up, "up"), self._pump(there, writer, self.downstream.extend, "down")
                )
            self._writers -= {writer, back}

        server = await asyncio.start_server(serve, "127.0.0.1", own)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.cut()
            await asyncio.sleep(0)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Callable[[bytes], object],
        way: str,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                note(data)
                if self.changes[way]:
                    self.changes[way] = False
                    data = data[:-1] + bytes([data[-1] ^ 1])
                writer.write(data)
                await writer.drain()
        writer.close()
