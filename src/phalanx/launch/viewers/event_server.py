"""Those who look at a run: they hear what has happened, then what happens, and may read what ranks have written.

Nobody who looks holds anything up: what one does not read is left out, and who is far behind is dropped, and may come
again. A node that does not lead hears it from the one that does, once for all who ask there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.contract import events
from phalanx.forkserver import wire
from phalanx.launch.ipc.control_socket import ControlSocket
from phalanx.launch.ipc.node_rpc import NodeRpc, RpcCarrier
from phalanx.launch.output import log_reader
from phalanx.launch.runs import event_cursor
from phalanx.launch.runs.event_cursor import EventCursor
from phalanx.launch.runs.run_folder import RunFolder
from phalanx.watch.source import SearchResult, Stream

if TYPE_CHECKING:
    from phalanx.launch.agent.watched import WatchedAgent

MOST = 48  # who look at the same time
_SIGHTS = 1 << 20  # bytes that one may be behind, until it gets no more sights
_FAR = 1 << 23  # bytes, until it is dropped
_UNREAD = 60.0  # seconds in which one that is told of the past reads nothing
_RENEWED = 2.0  # seconds between two letters by which a node says that it still wants to hear
_EXPIRES = 10.0  # seconds after the last of them
_ANSWER = 5.0  # seconds for another node
_NOTES = 100  # of what a search has left out
_ID = 16  # bytes of what stands before the lines in a letter: who leads
_SIGHT = b'{"event":"sample"'

Question = dict[str, Any]


class ViewerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """For a part of the past, of another node. It brings what there is to remember of the parts before."""

    since: float | None = None
    cursor: EventCursor | None = None


_wishes: msgspec.json.Decoder[ViewerRequest] = msgspec.json.Decoder(ViewerRequest)


class Viewer(asyncio.Protocol):
    """One who looks: a connection that is written to, and never waited for."""

    def __init__(self, audience: EventServer) -> None:
        self._audience = audience
        self._transport: asyncio.Transport | None = None
        self._held: deque[bytes] | None = deque()  # what happens while it is told of the past
        self._behind = 0  # bytes of that
        self._gone = False
        self._last = False  # nothing comes after what there is
        self._room = asyncio.Event()
        self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        transport.set_write_buffer_limits(_SIGHTS // 2)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self._transport, self._gone = None, True
        self._room.set()
        self._audience.left(self)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def hear(self, line: bytes) -> None:
        if self._gone or self._last:
            return
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if written + self._behind > _SIGHTS and line.startswith(_SIGHT):
            return
        if written + self._behind > _FAR:
            self.drop()
        elif self._held is not None:
            self._held.append(line)
            self._behind += len(line)
        elif self._transport is not None:
            self._transport.write(line)

    async def remember(self, lines: AsyncIterator[bytes]) -> None:
        """First what has happened."""
        try:
            async for part in lines:
                if self._transport is None:
                    return
                self._transport.write(part)
                async with asyncio.timeout(_UNREAD):
                    await self._room.wait()
        except TimeoutError:
            self.drop()
        held, self._held, self._behind = self._held or (), None, 0
        if self._transport is not None:
            self._transport.write(b"".join(held))
        if self._last:
            self.close()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._gone = True

    def close(self) -> None:
        """Once it has got everything."""
        self._last = True
        if self._transport is not None and self._held is None:
            self._transport.close()


class EventServer:
    def __init__(
        self, agent: WatchedAgent, coordinator: RpcCarrier, post: NodeRpc, desk: ControlSocket, folder: RunFolder
    ) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._post = post
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._id = os.urandom(_ID // 2).hex().encode()
        self._callers: set[Viewer] = set()
        self._members: dict[int, float] = {}  # nodes that want to hear: until when
        self._leader = b""  # of whom this node hears it
        self._heard_from = self._source
        self._renewing: asyncio.Task[None] | None = None
        self._numbers = 0
        self._asked: dict[tuple[int | None, int], asyncio.Future[bytes]] = {}
        self._reading = asyncio.Semaphore(4)  # files that are read at the same time
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = b""  # the last line
        folder.listeners.append(self._happened)
        desk.answers("watch", self._watch)
        desk.answers("log", self._answer)
        desk.answers("search", self._answer)
        post.reads("watch", self._wanted)
        post.reads("unwatch", lambda who, _, __: self._unwanted(who))
        post.reads("seen", self._seen)
        post.reads("past", lambda who, number, content: self._begin(self._tell_past(who, number, content)))
        post.reads("was", self._answered)
        post.reads("look", lambda who, number, content: self._begin(self._look(who, number, content)))
        post.reads("looked", self._answered)

    def end(self, code: int, seconds: float) -> None:
        """Everybody hears that it is over, before anybody writes it down."""
        self._ended = events.encode(events.RunEnded(time=time.time(), code=code, seconds=round(seconds, 3)))
        self._happened(self._ended)
        for caller in list(self._callers):
            caller.close()

    def close(self) -> None:
        if self._happened in self._folder.listeners:
            self._folder.listeners.remove(self._happened)
        for task in self._tasks:
            task.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        for caller in list(self._callers):
            caller.drop()

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what happens

    @property
    def _source(self) -> str:
        """Whose words are told here: this node's own, as long as it leads or there is nobody yet who does."""
        return "own" if self._coordinator.leads else "leader" if self._agent.together else "early"

    def _happened(self, line: bytes) -> None:
        """Here."""
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self._happened, line)
            return
        try:
            if self._members:
                self._pass_on(line)
            if self._callers and (self._source != "leader" or line is self._ended):
                for caller in list(self._callers):
                    caller.hear(line)
        except Exception:  # what only looks must not end what it looks at
            self._members.clear()
            self._start_over()

    def _pass_on(self, line: bytes) -> None:
        now = time.monotonic()
        self._members = {member: until for member, until in self._members.items() if until > now}
        for member in self._members if self._coordinator.leads else ():
            self._post.send("seen", 0, self._id + line, to=member)

    def _wanted(self, who: int | None, _: int, __: bytes) -> None:
        if who is not None and self._coordinator.leads:
            now = time.monotonic()
            anew = self._members.get(who, 0.0) <= now
            self._members[who] = now + _EXPIRES
            # Who leads, that it is over, and whether it was told everything since it last said so.
            self._post.send("seen", int(anew), self._id + self._ended, to=who)

    def _unwanted(self, who: int | None) -> None:
        if who is not None:
            self._members.pop(who, None)

    def _seen(self, who: int | None, anew: int, content: bytes) -> None:
        """What node 0 tells."""
        if who is not None or self._coordinator.leads:
            return
        leader, lines = content[:_ID], content[_ID:]
        if self._leader and (anew or leader != self._leader):
            self._start_over()
        self._leader = leader
        for caller in list(self._callers) if lines else ():
            caller.hear(lines)

    def _start_over(self) -> None:
        """Another leads, or we were not on its list: whoever looks calls again, and is told what it has missed."""
        for caller in list(self._callers):
            caller.drop()

    async def _renew(self) -> None:
        """As long as anybody looks here, and this node does not lead."""
        while self._callers:
            if self._source != self._heard_from:
                self._heard_from = self._source
                self._start_over()
            if self._heard_from == "leader":
                self._post.send("watch", 0, b"")
            await asyncio.sleep(_RENEWED if self._heard_from == "leader" else _RENEWED / 4)
        if self._heard_from == "leader":
            self._post.send("unwatch", 0, b"")

    # -- who looks

    async def _watch(self, question: wire.Message, sock: socket.socket) -> None:
        if len(self._callers) >= MOST:
            with sock:
                wire.send(sock, {"is": "refused", "why": f"{MOST} look at this run already"})
            return
        since = question.get("since")
        since = float(since) if isinstance(since, int | float) else None
        wire.send(sock, {"is": "watch", "early": self._source == "early"})
        sock.setblocking(False)
        caller = Viewer(self)
        # From here on it hears everything; what was before lies in the files, as far as they are now.
        self._callers.add(caller)
        cursor = event_cursor.begin(self._folder.path, since) if self._source != "leader" else None
        try:
            await self._loop.connect_accepted_socket(lambda: caller, sock)
        except OSError:
            self._callers.discard(caller)
            return
        if not self._coordinator.leads and (self._renewing is None or self._renewing.done()):
            self._heard_from, self._leader = self._source, b""
            self._renewing = self._loop.create_task(self._renew())
        if self._ended:
            caller.hear(self._ended)
            caller.close()
        self._begin(caller.remember(self._own_past(cursor) if cursor is not None else self._past_of_leader(since)))

    def left(self, caller: Viewer) -> None:
        self._callers.discard(caller)

    async def _own_past(self, cursor: EventCursor | None) -> AsyncIterator[bytes]:
        while cursor is not None:
            lines, cursor = await asyncio.to_thread(event_cursor.part, self._folder.path, cursor)
            yield lines

    async def _past_of_leader(self, since: float | None) -> AsyncIterator[bytes]:
        wish = msgspec.json.encode(ViewerRequest(since=since))
        while wish:
            answer = await self._ask(None, "past", wish)
            wish, _, lines = answer.partition(b"\n")
            yield lines

    async def _tell_past(self, who: int | None, number: int, content: bytes) -> None:
        if who is None or not self._coordinator.leads:
            return
        # What another node writes may be anything: then there is no answer.
        with contextlib.suppress(msgspec.MsgspecError, OSError, ValueError, OverflowError):
            wish = _wishes.decode(content)
            cursor = wish.cursor or event_cursor.begin(self._folder.path, wish.since)
            async with self._reading:
                lines, next_ = await asyncio.to_thread(event_cursor.part, self._folder.path, cursor)
            more = msgspec.json.encode(ViewerRequest(cursor=next_)) if next_ is not None else b""
            self._post.send("was", number, more + b"\n" + lines, to=who)

    # -- who reads what ranks have written

    async def _answer(self, question: wire.Message, sock: socket.socket) -> None:
        with contextlib.closing(sock):
            try:
                said = await self._looked(question)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                said = {"is": "refused", "why": f"that cannot be answered: {error}"}
            sock.setblocking(False)
            # Not by a thread, of which there are few: one who does not read would keep it from the run.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_ANSWER):
                    await self._loop.sock_sendall(sock, await asyncio.to_thread(wire.encode, said))

    async def _look(self, who: int | None, number: int, content: bytes) -> None:
        """Another node asks: the one that leads about ranks here, any other about all."""
        said: Question = {"is": "refused", "why": "that cannot be answered"}
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            said = await self._looked(msgspec.json.decode(content), here=not self._coordinator.leads)
        self._post.send("looked", number, msgspec.json.encode(said), to=who)

    async def _looked(self, question: Question, *, here: bool = False) -> Question:
        own = await self._own()
        if question["ask"] == "search":
            return await self._searched(question, own, here=here)
        rank = int(question["rank"])
        if rank not in own and not here:
            to = self._node_of(rank)
            if to is not None or not self._coordinator.leads:
                return await self._asked_about(to, question)
        stream: Stream = "stderr" if question.get("stream") == "stderr" else "stdout"
        start, size = question.get("start"), int(question.get("size", log_reader.PART))
        start = None if start is None else max(0, int(start))
        async with self._reading:
            found = await asyncio.to_thread(log_reader.part, own.get(rank), stream, start, size)
        return {"is": "log", **msgspec.to_builtins(found)}

    async def _searched(self, question: Question, own: dict[int, str], *, here: bool) -> Question:
        text, most = str(question["text"])[:1000], max(1, min(int(question.get("most", 200)), 1000))
        ranks = question.get("ranks")
        chosen = None if ranks is None else {int(rank) for rank in ranks}
        if not here and not self._coordinator.leads:
            return await self._asked_about(None, question)
        asked, elsewhere = [], []
        for member, theirs in self._coordinator.members().items() if not here else ():
            wanted = [rank for rank in theirs if chosen is None or rank in chosen]
            if wanted:
                asked.append(wanted)
                elsewhere.append(self._asked_about(member, {**question, "ranks": wanted}))
        folders = {rank: folder for rank, folder in own.items() if chosen is None or rank in chosen}
        async with self._reading:
            found = await asyncio.to_thread(log_reader.search, folders, text, most)
        for wanted, answer in zip(asked, await asyncio.gather(*elsewhere), strict=True):
            found += _found(answer, wanted)
        notes = [line for line in found if line.rank < 0]
        lines = sorted((line for line in found if line.rank >= 0), key=lambda line: (line.rank, line.stream))
        return {"is": "search", "found": msgspec.to_builtins(lines[:most] + notes[:_NOTES])}

    async def _own(self) -> dict[int, str]:
        """Folders of the ranks of this node."""
        attempt = self._agent.attempt
        if attempt is None:
            return await asyncio.to_thread(log_reader.folders, self._folder.path)
        workers = [worker for worker in attempt.workers.values() if not worker.spare]
        # One that lives has taken the place of one that does not.
        workers.sort(key=lambda worker: (worker.code is None, worker.born))
        return {worker.seat.rank: worker.folder for worker in workers}

    def _node_of(self, rank: int) -> int | None:
        return next((member for member, ranks in self._coordinator.members().items() if rank in ranks), None)

    # -- other nodes

    async def _asked_about(self, to: int | None, question: Question) -> Question:
        wanted = {name: value for name, value in question.items() if name != "key"}
        try:
            said = msgspec.json.decode(await self._ask(to, "look", msgspec.json.encode(wanted)))
            return said if isinstance(said, dict) else {}
        except (ValueError, RecursionError):
            return {}
        except TimeoutError:
            name = "node 0" if to is None else f"node {to}"
            return {"is": "refused", "why": f"{name} has not answered within {_patience(to):.0f} s"}

    async def _ask(self, to: int | None, kind: str, content: bytes) -> bytes:
        """Raises TimeoutError."""
        self._numbers += 1
        key = (to, self._numbers)
        answer = self._asked[key] = self._loop.create_future()
        self._post.send(kind, self._numbers, content, to=to)
        try:
            return await asyncio.wait_for(answer, _patience(to))
        finally:
            del self._asked[key]

    def _answered(self, who: int | None, number: int, content: bytes) -> None:
        answer = self._asked.get((who, number))
        if answer is not None and not answer.done():
            answer.set_result(content)


def _patience(to: int | None) -> float:
    """Node 0 may have to wait for another node itself."""
    return _ANSWER if to is not None else 2 * _ANSWER


def _found(answer: Question, wanted: Sequence[int]) -> list[SearchResult]:
    """What another node has found, of its own ranks; or why it has not."""
    why = answer.get("why", "a node has answered what cannot be read")
    with contextlib.suppress(msgspec.ValidationError):
        found = msgspec.convert(answer.get("found"), list[SearchResult])
        return [line for line in found if line.rank in wanted or line.rank < 0]
    return [SearchResult(rank=-1, stream="stdout", at=0, line=str(why))]
