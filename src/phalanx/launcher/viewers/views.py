"""Sources of the events and logs of a run for viewers: its agent while it runs, its files afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, cast

import msgspec

from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.errors import LaunchError
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.ipc.control_messages import (
    AnyQuery,
    AnyReply,
    LogQuery,
    LogReply,
    QueryRefused,
    SearchQuery,
    SearchReply,
    WatchQuery,
    WatchReply,
    WhyQuery,
    WhyReply,
)
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs import event_cursor
from phalanx.launcher.runs.finished_run import FinishedRun, RemoteRun, current_record, stacks_by_rank
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.watch.source import LogPart, SearchResult, Source, Stream, WhyAnswer

_REPLY_TIMEOUT = 20.0  # seconds for all nodes to answer
_RETRY_INTERVAL = 0.2  # seconds between two attempts to reach an agent
_MOST_REMEMBERED = 4096  # lines, to recognize duplicates
_LONGEST = 1 << 26  # bytes of a line

_Kind = TypeVar("_Kind")
_Reply = TypeVar("_Reply", bound=AnyReply)


def of(run: RunRecord) -> Source:
    """Return the source for a run."""
    if run.alive:
        return LiveRun(run)
    return FinishedRun(run) if run.here or run.ended is not None else RemoteRun(run)


class LiveRun:
    """A run with an agent on this host, whichever node it is."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run.id
        self._record = run
        self._since: float | None = None  # time of the newest event so far
        self._seen: dict[int, None] = {}  # in order
        self._started = False  # RunStarted was returned

    @property
    def alive(self) -> bool:
        """Return whether the run is still running."""
        self._record = current_record(self._record)
        return self._record.alive

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield all events. Reconnects when the connection breaks or another node becomes the leader."""
        tries = int(control_socket.HANDLER_TIMEOUT / _RETRY_INTERVAL)
        while await asyncio.to_thread(lambda: self.alive):
            try:
                sock, early = await _in_daemon_thread(self._call)
            except LaunchError:
                tries -= 1
                # Its control socket does not exist yet, or no longer.
                if not tries and self._since is None:
                    raise
            else:
                async for event in self._lines(sock, early=early):
                    yield event
                    if isinstance(event, events.RunEnded):
                        return
            await asyncio.sleep(_RETRY_INTERVAL)
        async for event in self._rest():
            yield event

    async def _rest(self) -> AsyncIterator[AnyEvent]:
        """Yield events that the agent had written but not sent before it ended."""
        folder = self._record.folder
        if os.path.basename(folder).startswith("node_"):  # its files have only its own events, not the leader's
            last = await asyncio.to_thread(_last, folder)
            if last is not None:
                yield last
            return
        cursor: event_cursor.EventCursor | None = await asyncio.to_thread(event_cursor.begin, folder, self._since)
        while cursor is not None:
            lines, cursor = await asyncio.to_thread(event_cursor.part, folder, cursor)
            for line in lines.splitlines(keepends=True):
                with contextlib.suppress(msgspec.MsgspecError):
                    if self._new(line):
                        yield events.decode(line)

    def _call(self) -> tuple[socket.socket, bool]:
        sock = control_socket.call(self._record, WatchQuery(since=self._since))
        try:
            sock.settimeout(_REPLY_TIMEOUT)
            greeting, _ = control_socket.receive(sock)
            if not isinstance(greeting, WatchReply):
                why = greeting.why if isinstance(greeting, QueryRefused) else "unexpected reply"
                raise LaunchError(f"{self.run} cannot be watched: {why}", fix="phalanx ps lists the runs on this host")
            sock.setblocking(False)
            return sock, greeting.early
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise _no_answer(self._record) from error
            raise

    async def _lines(self, sock: socket.socket, *, early: bool) -> AsyncIterator[AnyEvent]:
        """Yield events from a connection. `early`: those of a node that has not joined; later ones start over."""
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_LONGEST)
        try:
            with contextlib.suppress(OSError, ValueError):
                while (line := await reader.readline()).endswith(b"\n"):
                    if not self._new(line):
                        continue
                    with contextlib.suppress(msgspec.MsgspecError):  # of another version
                        event = events.decode(line)
                        if isinstance(event, events.RunStarted):
                            if self._started:
                                continue  # of another node, which leads now
                            self._started = not early
                        if not early:
                            self._since = max(self._since or 0.0, event.time)
                        yield event
        finally:
            writer.transport.abort()

    def _new(self, line: bytes) -> bool:
        """Return whether a line is new. The latest lines can arrive twice: from the files, and live."""
        mark = hash(line)
        if mark in self._seen:
            return False
        self._seen[mark] = None
        if len(self._seen) > _MOST_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return True

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = log_reader.PART) -> LogPart:
        """Return a part of a rank's output."""
        if not self.alive:
            return await FinishedRun(self._record).log(rank, stream, start=start, size=size)
        query = LogQuery(rank=rank, stream=stream, start=start, size=size)
        return (await self._ask(query, LogReply)).part

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        """Return the lines of output that contain a text."""
        if not self.alive:
            return await FinishedRun(self._record).search(text, ranks, most=most)
        query = SearchQuery(text=text, ranks=None if ranks is None else tuple(ranks), most=most)
        return list((await self._ask(query, SearchReply)).found)

    async def why(self) -> WhyAnswer:
        """Return why the run is stalled or ended."""
        if not self.alive:
            return await FinishedRun(self._record).why()
        reply = await self._ask(WhyQuery(), WhyReply)
        return WhyAnswer(
            report=reply.report,
            verdicts=tuple(verdict.text for verdict in reply.verdicts),
            stacks=stacks_by_rank(reply.evidence),
        )

    async def _ask(self, query: AnyQuery, kind: type[_Reply]) -> _Reply:
        return await _in_daemon_thread(lambda: self._request(query, kind))

    def _request(self, query: AnyQuery, kind: type[_Reply]) -> _Reply:
        try:
            reply = control_socket.request(self._record, query, kind, timeout=_REPLY_TIMEOUT)
        except ConnectionResetError:
            reply = QueryRefused(why="it has ended")
        except OSError as error:
            raise _no_answer(self._record) from error
        if isinstance(reply, QueryRefused):
            raise LaunchError(f"{self.run} does not answer: {reply.why}", fix=f"phalanx why {self.run}")
        return reply


async def _in_daemon_thread(work: Callable[[], _Kind]) -> _Kind:
    """Run `work` in a daemon thread: exiting does not wait for an agent that does not answer."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Kind] = loop.create_future()

    def settle(result: _Kind | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("_Kind", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="phalanx-asks", daemon=True).start()
    return await done


def _no_answer(run: RunRecord) -> LaunchError:
    return LaunchError(
        f"{run.id} does not answer",
        details=[f"its agent is process {run.pid} on {run.host or 'this host'}"],
        fix=f"phalanx why --pid {run.pid}",
    )


def _last(folder: str) -> AnyEvent | None:
    """Return the last event if it is the end of the run."""
    with contextlib.suppress(OSError), open(os.path.join(folder, "events.jsonl"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(msgspec.MsgspecError):
                event = events.decode(line)
                return event if isinstance(event, events.RunEnded) else None
    return None
