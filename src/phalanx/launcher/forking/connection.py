"""The connection of an agent to one fork server: its messages, requests to it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
from collections.abc import Callable

from phalanx.forkserver import linux, wire
from phalanx.launcher.forking import liveness
from phalanx.launcher.forking.fork_servers import ForkServerClient
from phalanx.launcher.forking.liveness import Liveness
from phalanx.launcher.ipc.pending_replies import PendingReplies
from phalanx.launcher.runs import root_cause

END_TIMEOUT = 15.0  # seconds for a fork server to end: it kills its processes after one second
_EXIT_TIMEOUT = 1.0  # seconds to exit after that, before SIGKILL


class ForkServerConnection:
    """One fork server, from its imports to its end. Needs a running event loop.

    `on_message` gets its messages about processes and signals. `on_lost` is called if it ends, or if it was killed
    because it did not answer. `timeout`: seconds that the user allows a process without a heartbeat. `start`: seconds
    for its imports.
    """

    def __init__(
        self,
        client: ForkServerClient,
        on_message: Callable[[wire.Message], None],
        on_lost: Callable[[], None],
        *,
        timeout: float,
        start: float = math.inf,
    ) -> None:
        self.client = client
        self.lost = ""  # how it was lost; empty: it was not
        self.ended = False  # on request, with all processes below it
        self._on_message = on_message
        self._on_lost = on_lost
        self._imported = client.ready is not None
        self._ready: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._replies: PendingReplies[wire.Message] = PendingReplies()
        self._liveness = Liveness(timeout, start=start)
        self._pinged = False  # waiting for the answer
        self._killed = ""  # why it was killed here
        self._watch: asyncio.Task[None] | None = None

    async def ready(self) -> wire.Message:
        """Wait for the imports, and return the report about them. Empty: it ended before, or `stop_waiting`."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.client.sock.fileno(), self._read)
        self._watch = loop.create_task(self._watch_liveness())
        if self.client.ready is not None:
            self._resolve(self.client.ready)
        return await self._ready

    def stop_waiting(self) -> None:
        """Make `ready` return without a report."""
        self._resolve({})

    def _resolve(self, message: wire.Message) -> None:
        if not self._ready.done():
            self._ready.set_result(message)

    def _read(self) -> None:
        try:
            message = self.client.receive()
        except TimeoutError:  # it was stopped in the middle of a message
            self._kill("an incomplete message")
            return
        if message is None:
            self._set_lost()
            return
        if message["is"] == "ready":
            self._imported = True
            self._resolve(message)
        elif message["is"] == "pong":
            self._pinged = False
            self._liveness.record_answer()
        elif not self._replies.resolve(message.get("id", 0), message):
            self._on_message(message)

    def _set_lost(self) -> None:
        asyncio.get_running_loop().remove_reader(self.client.sock.fileno())
        self._stop_watching()
        code = self.client.gone()
        self.lost = self._killed or ("unknown" if code is None else root_cause.in_words(code))
        self._resolve({})
        self._replies.fail_all(ConnectionResetError())
        self._on_lost()

    async def _watch_liveness(self) -> None:
        """Ping the fork server once per second, and kill it if it does not answer for too long."""
        while True:
            await asyncio.sleep(liveness.INTERVAL)
            if self._imported and not self._pinged:
                self._pinged = True
                with contextlib.suppress(OSError):
                    self.client.send({"do": "ping"})
            why = self._liveness.look(linux.state(self.client.pid))
            if why:
                self._kill(why)

    def kill_if_stopped(self) -> None:
        """Kill the fork server now if it is stopped: it would not forward any signal."""
        if not self.lost and not self.client.closed and linux.state(self.client.pid) == "stopped":
            self._kill("stopped")

    def _kill(self, why: str) -> None:
        """Kill a fork server that does not answer. The end of its connection follows."""
        self._killed = self._killed or f"{why}, so it was killed"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.client.pid, signal.SIGKILL)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def ask(self, what: str) -> wire.Message:
        """Send a request and return the answer. Empty if the fork server has ended."""
        try:
            return await self._replies.request(
                lambda number: self.client.send({"do": what, "id": number}), timeout=None
            )
        except OSError:
            return {}

    async def end(self, *, leave: bool = False) -> None:
        """Make the fork server end all its processes, or `leave` them, and exit. Kill it if it does not answer."""
        if self.client.closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.client.sock.fileno())
        self._stop_watching()
        if linux.state(self.client.pid) == "stopped":
            self._kill("stopped")
        if self.client.process is not None and not self._imported:
            self.client.process.kill()  # it still imports: it reads no messages and has started no process
        ended: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(self.client.sock.fileno(), _read_end, self.client, ended)
        with contextlib.suppress(OSError):
            self.client.send({"do": "end", "leave": leave})
        await asyncio.wait((ended,), timeout=END_TIMEOUT)
        loop.remove_reader(self.client.sock.fileno())
        self.client.sock.close()
        self.ended = ended.done() and ended.result()
        if not self.ended:
            self.reap()

    def reap(self, timeout: float = _EXIT_TIMEOUT) -> None:
        """Wait for the process of the fork server to exit, and kill it after `timeout` seconds."""
        process = self.client.process
        if process is None or process.poll() is not None:
            return
        handle = os.pidfd_open(process.pid)
        gone, _, _ = select.select([handle], [], [], timeout)
        os.close(handle)
        if not gone:
            process.kill()
        process.wait()


def _read_end(client: ForkServerClient, ended: asyncio.Future[bool]) -> None:
    """Resolve `ended` when the fork server is done. True: it has ended all its processes, and exits."""
    try:
        message = client.receive()
    except (OSError, ValueError):
        message = None
    if message is None or message["is"] == "ended":
        asyncio.get_running_loop().remove_reader(client.sock.fileno())
        ended.set_result(message is not None and not message["left"])
