"""Serves events to viewers: first the past of the run, then everything as it happens.

A slow viewer delays no one: it gets fewer samples, and is dropped if it falls far behind; it may reconnect. A follower
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
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.contract import encoding, events
from phalanx.contract.encoding import Decoder
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import QueryRefused, WatchQuery, WatchReply
from phalanx.launcher.runs import event_cursor
from phalanx.launcher.runs.event_cursor import EventCursor
from phalanx.launcher.viewers.log_queries import LogQueries, node_timeout
from phalanx.launcher.viewers.viewer import Viewer

if TYPE_CHECKING:
    from phalanx.launcher.workers.watched import WatchContext

logger = logging.getLogger(__name__)

MAX_VIEWERS = 48  # at the same time
_RENEW_INTERVAL = 2.0  # seconds between two renewals of a node's subscription
_EXPIRES = 10.0  # seconds after the last renewal
_ID = 16  # bytes before the lines of a message: the id of the leader


class ViewerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of another node for the next part of the past."""

    since: float | None = None
    cursor: EventCursor | None = None


_viewer_requests: Decoder[ViewerRequest] = Decoder(ViewerRequest)


class EventServer:
    """Answers the request "watch" of viewers on this node, and of other nodes; `LogQueries` answers those about
    logs.
    """

    def __init__(self, context: WatchContext) -> None:
        self._agent = context.agent
        self._links = context.links
        self._rpc = context.rpc
        self._folder = context.folder
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
        self._folder.listeners.append(self._publish)
        context.control.on(WatchQuery, self._watch)
        self._rpc.on("watch", self._subscribe)
        self._rpc.on("unwatch", lambda who, _, __: self._unsubscribe(who))
        self._rpc.on("events", self._receive)
        self._rpc.serve("past", self._answer_past)
        LogQueries(context, reading=self._reading)

    def end(self, code: int, seconds: float) -> None:
        """Tell all viewers that the run is over, and disconnect them."""
        preempted = self._folder.is_preempted(code)
        self._ended = events.encode(
            events.RunEnded(time=time.time(), code=code, seconds=round(seconds, 3), preempted=preempted)
        )
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
        """Return the source of events for viewers: this node while it leads or has not joined, otherwise the leader."""
        return "own" if self._links.leads else "leader" if self._agent.all_joined else "early"

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
        for member in self._members if self._links.leads else ():
            self._rpc.send("events", 0, self._id + line, to=member)

    def _subscribe(self, who: int | None, _: int, __: bytes) -> None:
        if who is not None and self._links.leads:
            now = time.monotonic()
            renewed = self._members.get(who, 0.0) > now
            self._members[who] = now + _EXPIRES
            # It contains the leader's id, the end of the run if there is one, and whether events were missed.
            self._rpc.send("events", int(not renewed), self._id + self._ended, to=who)

    def _unsubscribe(self, who: int | None) -> None:
        if who is not None:
            self._members.pop(who, None)

    def _receive(self, who: int | None, missed: int, content: bytes) -> None:
        """Handle events from the leader."""
        if who is not None or self._links.leads:
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

    async def _watch(self, query: WatchQuery, sock: socket.socket) -> None:
        if len(self._viewers) >= MAX_VIEWERS:
            with sock:
                control_socket.send(sock, QueryRefused(why=f"this run has {MAX_VIEWERS} viewers already"))
            return
        since = query.since
        control_socket.send(sock, WatchReply(early=self._source == "early"))
        sock.setblocking(False)
        viewer = Viewer(self._viewers.discard)
        # From here on the viewer gets all new events; older ones are in the files up to their current size.
        self._viewers.add(viewer)
        cursor = event_cursor.begin(self._folder.path, since) if self._source != "leader" else None
        try:
            await self._loop.connect_accepted_socket(lambda: viewer, sock)
        except OSError:
            self._viewers.discard(viewer)
            return
        if not self._links.leads and (self._subscription is None or self._subscription.done()):
            self._followed, self._leader = self._source, b""
            self._subscription = self._loop.create_task(self._keep_subscribed())
        if self._ended:
            viewer.send(self._ended)
            viewer.close()
        self._start(viewer.send_past(self._own_past(cursor) if cursor is not None else self._past_of_leader(since)))

    async def _own_past(self, cursor: EventCursor | None) -> AsyncIterator[bytes]:
        while cursor is not None:
            lines, cursor = await asyncio.to_thread(event_cursor.part, self._folder.path, cursor)
            yield lines

    async def _past_of_leader(self, since: float | None) -> AsyncIterator[bytes]:
        request = encoding.encode(ViewerRequest(since=since))
        while request:
            answer = await self._rpc.request("past", request, timeout=node_timeout(None))
            request, _, lines = answer.partition(b"\n")
            yield lines

    async def _answer_past(self, who: int | None, content: bytes) -> bytes | None:
        if who is None or not self._links.leads:
            return None
        # Other nodes are not trusted: a malformed request gets no answer.
        with contextlib.suppress(msgspec.MsgspecError, OSError, ValueError, OverflowError):
            request = _viewer_requests.decode(content)
            cursor = request.cursor or event_cursor.begin(self._folder.path, request.since)
            async with self._reading:
                lines, next_ = await asyncio.to_thread(event_cursor.part, self._folder.path, cursor)
            more = encoding.encode(ViewerRequest(cursor=next_)) if next_ is not None else b""
            return more + b"\n" + lines
        return None
