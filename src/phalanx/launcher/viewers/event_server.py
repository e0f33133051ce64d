"""Serves events to viewers: first the past of the run, then everything as it happens; also logs and searches.

A slow viewer delays nobody: it gets fewer samples, and is dropped if it falls far behind; it may reconnect. A follower
gets the events from the leader, once for all its viewers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.contract import encoding, events
from phalanx.contract.encoding import Decoder
from phalanx.forkserver import wire
from phalanx.launcher.ipc.control_socket import ControlSocket
from phalanx.launcher.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs import event_cursor
from phalanx.launcher.runs.event_cursor import EventCursor
from phalanx.launcher.runs.run_folder import RunFolder
from phalanx.watch.source import SearchResult, Stream

if TYPE_CHECKING:
    from phalanx.launcher.agent.watched import WatchedAgent

logger = logging.getLogger(__name__)

MAX_VIEWERS = 48  # at the same time
_SAMPLES_LIMIT = 1 << 20  # bytes: a viewer that is further behind gets no samples
_DROP_LIMIT = 1 << 23  # bytes: a viewer that is further behind is dropped
_STUCK = 60.0  # seconds without reading anything, while it is sent the past
_RENEW_INTERVAL = 2.0  # seconds between two renewals of a node's subscription
_EXPIRES = 10.0  # seconds after the last renewal
_NODE_TIMEOUT = 5.0  # seconds for another node
_MOST_NOTES = 100  # about what a search left out
_ID = 16  # bytes before the lines of a message: the id of the leader
_SAMPLE_PREFIX = b'{"event":"%b"' % str(events.ClusterSample.__struct_config__.tag).encode()

Query = dict[str, Any]


class ViewerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of another node for the next part of the past."""

    since: float | None = None
    cursor: EventCursor | None = None


_viewer_requests: Decoder[ViewerRequest] = Decoder(ViewerRequest)
_queries: Decoder[Query] = Decoder(Query)


class Viewer(asyncio.Protocol):
    """One connection to a viewer. Writing to it never blocks."""

    def __init__(self, server: EventServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._held: deque[bytes] | None = deque()  # what happens while it is sent the past
        self._behind = 0  # bytes of that
        self._gone = False
        self._last = False  # nothing more follows
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        transport.set_write_buffer_limits(_SAMPLES_LIMIT // 2)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        """Remove the viewer from the server."""
        self._transport, self._gone = None, True
        self._room.set()
        self._server.viewer_left(self)

    def pause_writing(self) -> None:
        """Stop sending the past."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Continue to send the past."""
        self._room.set()

    def send(self, line: bytes) -> None:
        """Send a line, unless the viewer is too far behind."""
        if self._gone or self._last:
            return
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if written + self._behind > _SAMPLES_LIMIT and line.startswith(_SAMPLE_PREFIX):
            return
        if written + self._behind > _DROP_LIMIT:
            self.drop()
        elif self._held is not None:
            self._held.append(line)
            self._behind += len(line)
        elif self._transport is not None:
            self._transport.write(line)

    async def send_past(self, lines: AsyncIterator[bytes]) -> None:
        """Send the past, then what has happened meanwhile."""
        try:
            async for part in lines:
                if self._transport is None:
                    return
                self._transport.write(part)
                async with asyncio.timeout(_STUCK):
                    await self._room.wait()
        except TimeoutError:
            self.drop()
        held, self._held, self._behind = self._held or (), None, 0
        if self._transport is not None:
            self._transport.write(b"".join(held))
        if self._last:
            self.close()

    def drop(self) -> None:
        """Disconnect at once."""
        if self._transport is not None:
            self._transport.abort()
        self._gone = True

    def close(self) -> None:
        """Disconnect once everything is sent."""
        self._last = True
        if self._transport is not None and self._held is None:
            self._transport.close()


class EventServer:
    """Answers the requests "watch", "log" and "search" of viewers on this node, and of other nodes."""

    def __init__(
        self, agent: WatchedAgent, coordinator: RpcCarrier, rpc: NodeRpc, control: ControlSocket, folder: RunFolder
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._rpc = rpc
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._id = os.urandom(_ID // 2).hex().encode()
        self._viewers: set[Viewer] = set()
        self._members: dict[int, float] = {}  # subscribed nodes: until when
        self._leader = b""  # id of the leader that sends to this node
        self._followed = self._source
        self._subscription: asyncio.Task[None] | None = None
        self._reading = asyncio.Semaphore(4)  # logs that are read at the same time
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = b""  # the last line
        folder.listeners.append(self._publish)
        control.on("watch", self._watch)
        control.serve("log", self._answer)
        control.serve("search", self._answer)
        rpc.on("watch", self._subscribe)
        rpc.on("unwatch", lambda who, _, __: self._unsubscribe(who))
        rpc.on("events", self._receive)
        rpc.serve("past", self._answer_past)
        rpc.serve("query", self._answer_node)

    def end(self, code: int, seconds: float) -> None:
        """Tell all viewers that the run is over, and disconnect them."""
        self._ended = events.encode(events.RunEnded(time=time.time(), code=code, seconds=round(seconds, 3)))
        self._publish(self._ended)
        for viewer in list(self._viewers):
            viewer.close()

    def close(self) -> None:
        """Drop all viewers."""
        if self._publish in self._folder.listeners:
            self._folder.listeners.remove(self._publish)
        for task in self._tasks:
            task.cancel()
        if self._subscription is not None:
            self._subscription.cancel()
        for viewer in list(self._viewers):
            viewer.drop()

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- events

    @property
    def _source(self) -> str:
        """Return whose events viewers get: this node's while it leads or has not joined, else the leader's."""
        return "own" if self._coordinator.leads else "leader" if self._agent.all_joined else "early"

    def _publish(self, line: bytes) -> None:
        """Send an event of this node to all viewers and subscribed nodes."""
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._publish, line)
            return
        try:
            if self._members:
                self._forward(line)
            if self._viewers and (self._source != "leader" or line is self._ended):
                for viewer in list(self._viewers):
                    viewer.send(line)
        except Exception:  # viewers must not disturb the run
            logger.debug("cannot send an event to viewers", exc_info=True)
            self._members.clear()
            self._drop_all()

    def _forward(self, line: bytes) -> None:
        now = time.monotonic()
        self._members = {member: until for member, until in self._members.items() if until > now}
        for member in self._members if self._coordinator.leads else ():
            self._rpc.send("events", 0, self._id + line, to=member)

    def _subscribe(self, who: int | None, _: int, __: bytes) -> None:
        if who is not None and self._coordinator.leads:
            now = time.monotonic()
            renewed = self._members.get(who, 0.0) > now
            self._members[who] = now + _EXPIRES
            # It contains the leader's id, the end of the run if there is one, and whether events were missed.
            self._rpc.send("events", int(not renewed), self._id + self._ended, to=who)

    def _unsubscribe(self, who: int | None) -> None:
        if who is not None:
            self._members.pop(who, None)

    def _receive(self, who: int | None, missed: int, content: bytes) -> None:
        """Take events from the leader."""
        if who is not None or self._coordinator.leads:
            return
        leader, lines = content[:_ID], content[_ID:]
        if self._leader and (missed or leader != self._leader):
            self._drop_all()
        self._leader = leader
        for viewer in list(self._viewers) if lines else ():
            viewer.send(lines)

    def _drop_all(self) -> None:
        """Drop all viewers, because events were missed: they reconnect and get them."""
        for viewer in list(self._viewers):
            viewer.drop()

    async def _keep_subscribed(self) -> None:
        """Renew the subscription at the leader, as long as this node has viewers and does not lead."""
        while self._viewers:
            if self._source != self._followed:
                self._followed = self._source
                self._drop_all()
            if self._followed == "leader":
                self._rpc.send("watch", 0, b"")
            await asyncio.sleep(_RENEW_INTERVAL if self._followed == "leader" else _RENEW_INTERVAL / 4)
        if self._followed == "leader":
            self._rpc.send("unwatch", 0, b"")

    # -- viewers

    async def _watch(self, query: wire.Message, sock: socket.socket) -> None:
        if len(self._viewers) >= MAX_VIEWERS:
            with sock:
                wire.send(sock, {"is": "refused", "why": f"this run has {MAX_VIEWERS} viewers already"})
            return
        since = query.get("since")
        since = float(since) if isinstance(since, int | float) else None
        wire.send(sock, {"is": "watch", "early": self._source == "early"})
        sock.setblocking(False)
        viewer = Viewer(self)
        # From here on the viewer gets all new events; older ones are in the files up to their current size.
        self._viewers.add(viewer)
        cursor = event_cursor.begin(self._folder.path, since) if self._source != "leader" else None
        try:
            await self._loop.connect_accepted_socket(lambda: viewer, sock)
        except OSError:
            self._viewers.discard(viewer)
            return
        if not self._coordinator.leads and (self._subscription is None or self._subscription.done()):
            self._followed, self._leader = self._source, b""
            self._subscription = self._loop.create_task(self._keep_subscribed())
        if self._ended:
            viewer.send(self._ended)
            viewer.close()
        self._start(viewer.send_past(self._own_past(cursor) if cursor is not None else self._past_of_leader(since)))

    def viewer_left(self, viewer: Viewer) -> None:
        """Forget a viewer that has disconnected."""
        self._viewers.discard(viewer)

    async def _own_past(self, cursor: EventCursor | None) -> AsyncIterator[bytes]:
        while cursor is not None:
            lines, cursor = await asyncio.to_thread(event_cursor.part, self._folder.path, cursor)
            yield lines

    async def _past_of_leader(self, since: float | None) -> AsyncIterator[bytes]:
        request = encoding.encode(ViewerRequest(since=since))
        while request:
            answer = await self._rpc.request("past", request, timeout=_timeout(None))
            request, _, lines = answer.partition(b"\n")
            yield lines

    async def _answer_past(self, who: int | None, content: bytes) -> bytes | None:
        if who is None or not self._coordinator.leads:
            return None
        # Do not trust another node: a malformed request gets no answer.
        with contextlib.suppress(msgspec.MsgspecError, OSError, ValueError, OverflowError):
            request = _viewer_requests.decode(content)
            cursor = request.cursor or event_cursor.begin(self._folder.path, request.since)
            async with self._reading:
                lines, next_ = await asyncio.to_thread(event_cursor.part, self._folder.path, cursor)
            more = encoding.encode(ViewerRequest(cursor=next_)) if next_ is not None else b""
            return more + b"\n" + lines
        return None

    # -- logs

    async def _answer(self, query: wire.Message) -> wire.Message:
        try:
            return await self._read(query)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            return {"is": "refused", "why": f"invalid request: {error}"}

    async def _answer_node(self, _: int | None, content: bytes) -> bytes:
        """Answer another node: the leader about ranks of this node, a follower about all ranks."""
        reply: Query = {"is": "refused", "why": "invalid request"}
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            reply = await self._read(_queries.decode(content), here=not self._coordinator.leads)
        return encoding.encode(reply)

    async def _read(self, query: Query, *, here: bool = False) -> Query:
        own = await self._own_folders()
        if query["ask"] == "search":
            return await self._searched(query, own, here=here)
        rank = int(query["rank"])
        if rank not in own and not here:
            to = self._node_of(rank)
            if to is not None or not self._coordinator.leads:
                return await self._ask_node(to, query)
        stream: Stream = "stderr" if query.get("stream") == "stderr" else "stdout"
        start, size = query.get("start"), int(query.get("size", log_reader.PART))
        start = None if start is None else max(0, int(start))
        async with self._reading:
            found = await asyncio.to_thread(log_reader.part, own.get(rank), stream, start, size)
        return {"is": "log", **msgspec.to_builtins(found)}

    async def _searched(self, query: Query, own: dict[int, str], *, here: bool) -> Query:
        text, most = str(query["text"])[:1000], max(1, min(int(query.get("most", 200)), 1000))
        ranks = query.get("ranks")
        chosen = None if ranks is None else {int(rank) for rank in ranks}
        if not here and not self._coordinator.leads:
            return await self._ask_node(None, query)
        asked, elsewhere = [], []
        for member, theirs in self._coordinator.members().items() if not here else ():
            wanted = [rank for rank in theirs if chosen is None or rank in chosen]
            if wanted:
                asked.append(wanted)
                elsewhere.append(self._ask_node(member, {**query, "ranks": wanted}))
        folders = {rank: folder for rank, folder in own.items() if chosen is None or rank in chosen}
        async with self._reading:
            found = await asyncio.to_thread(log_reader.search, folders, text, most)
        for wanted, answer in zip(asked, await asyncio.gather(*elsewhere), strict=True):
            found += _found(answer, wanted)
        notes = [line for line in found if line.rank < 0]
        lines = sorted((line for line in found if line.rank >= 0), key=lambda line: (line.rank, line.stream))
        return {"is": "search", "found": msgspec.to_builtins(lines[:most] + notes[:_MOST_NOTES])}

    async def _own_folders(self) -> dict[int, str]:
        """Return the folders of the ranks of this node."""
        attempt = self._agent.attempt
        if attempt is None:
            return await asyncio.to_thread(log_reader.folders, self._folder.path)
        workers = [worker for worker in attempt.workers.values() if not worker.spare]
        # Living workers last: they replace dead ones of the same rank.
        workers.sort(key=lambda worker: (worker.code is None, worker.born))
        return {worker.seat.rank: worker.folder for worker in workers}

    def _node_of(self, rank: int) -> int | None:
        return next((member for member, ranks in self._coordinator.members().items() if rank in ranks), None)

    # -- other nodes

    async def _ask_node(self, to: int | None, query: Query) -> Query:
        try:
            return _queries.decode(
                await self._rpc.request("query", encoding.encode(query), to=to, timeout=_timeout(to))
            )
        except msgspec.DecodeError:
            return {}
        except TimeoutError:
            name = "node 0" if to is None else f"node {to}"
            return {"is": "refused", "why": f"{name} has not answered within {_timeout(to):.0f} s"}


def _timeout(to: int | None) -> float:
    """Return the timeout for a node: the leader may have to wait for another node itself."""
    return _NODE_TIMEOUT if to is not None else 2 * _NODE_TIMEOUT


def _found(answer: Query, wanted: Sequence[int]) -> list[SearchResult]:
    """Return what another node has found for its own ranks, or a note that says why it has not."""
    why = answer.get("why", "unreadable answer of a node")
    with contextlib.suppress(msgspec.ValidationError):
        found = msgspec.convert(answer.get("found"), list[SearchResult])
        return [line for line in found if line.rank in wanted or line.rank < 0]
    return [SearchResult(rank=-1, stream="stdout", at=0, line=str(why))]
