"""Sources of a run's events and logs for viewers: its agent while it runs, its folder afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.diagnose.evidence import Evidence
from phalanx.errors import LaunchError
from phalanx.forkserver import wire
from phalanx.launcher.hangs import stacks
from phalanx.launcher.ipc import control_socket
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs import event_cursor, postmortem, run_folder
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.watch.source import LogPart, SearchResult, Source, Stream, WhyAnswer

_REPLY_TIMEOUT = 20.0  # seconds for all nodes to answer
_RETRY_INTERVAL = 0.2  # seconds between two attempts to reach an agent
_MOST_REMEMBERED = 4096  # lines, to recognize duplicates
_LONGEST = 1 << 26  # bytes of a line
_POLL_INTERVAL = 1.0  # seconds between two reads of files that another host writes
_GIVE_UP = 600.0  # seconds without a new line: whether the run still exists is unknown

_Kind = TypeVar("_Kind")


def of(run: RunRecord) -> Source:
    """Return the source for a run."""
    if run.alive:
        return LiveRun(run)
    return FinishedRun(run) if run.here or run.ended is not None else RemoteRun(run)


class LiveRun:
    """A run with an agent on this host, on whichever node that is."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run.id
        self._record = run
        self._since: float | None = None  # time of the newest event so far
        self._seen: dict[int, None] = {}  # in order
        self._started = False  # RunStarted was returned

    @property
    def alive(self) -> bool:
        """Return whether the run is still running."""
        self._record = _current(self._record)
        return self._record.alive

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield all events. Reconnects when the connection breaks or another node becomes the leader."""
        tries = int(control_socket.HANDLER_TIMEOUT / _RETRY_INTERVAL)
        while await asyncio.to_thread(lambda: self.alive):
            try:
                sock, early = await _in_daemon_thread(self._call)
            except LaunchError:
                tries -= 1
                # Its control socket does not exist yet, or not any more.
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
        """Yield what the agent had written but not sent before it ended."""
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
        sock = control_socket.call(self._record, {"ask": "watch", "since": self._since})
        try:
            sock.settimeout(_REPLY_TIMEOUT)
            greeting = wire.receive(sock)
            if greeting is None or greeting[0].get("is") != "watch":
                why = greeting[0].get("why", "") if greeting is not None else "it closed the connection"
                raise LaunchError(f"{self.run} cannot be watched: {why}", fix="phalanx ps lists the runs on this host")
            sock.setblocking(False)
            return sock, bool(greeting[0].get("early"))
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
        reply = await self._ask({"ask": "log", "rank": rank, "stream": stream, "start": start, "size": size})
        return self._read(reply, LogPart)

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        """Return the lines of output that contain a text."""
        if not self.alive:
            return await FinishedRun(self._record).search(text, ranks, most=most)
        wanted = None if ranks is None else list(ranks)
        reply = await self._ask({"ask": "search", "text": text, "ranks": wanted, "most": most})
        return self._read(reply.get("found"), list[SearchResult])

    async def why(self) -> WhyAnswer:
        """Return why the run is stalled or ended."""
        if not self.alive:
            return await FinishedRun(self._record).why()
        reply = await self._ask({"ask": "why"})
        evidence = msgspec.convert(reply["evidence"], Evidence)
        return WhyAnswer(
            report=str(reply["report"]),
            verdicts=tuple(str(verdict["text"]) for verdict in reply["verdicts"]),
            stacks=_stacks(evidence),
        )

    def _read(self, reply: object, kind: type[_Kind]) -> _Kind:
        """Convert an answer, which may be malformed if it is from another node."""
        try:
            return msgspec.convert(reply, kind)
        except msgspec.ValidationError as error:
            raise LaunchError(f"{self.run}: unreadable answer: {error}") from None

    async def _ask(self, request: wire.Message) -> dict[str, Any]:
        return await _in_daemon_thread(lambda: self._request(request))

    def _request(self, request: wire.Message) -> dict[str, Any]:
        try:
            reply = control_socket.request(self._record, request, timeout=_REPLY_TIMEOUT)
        except ConnectionResetError:
            reply = {"is": "refused", "why": "it has ended"}
        except OSError as error:
            raise _no_answer(self._record) from error
        if reply.get("is") != request["ask"]:
            raise LaunchError(f"{self.run} does not answer: {reply.get('why', '')}", fix=f"phalanx why {self.run}")
        return reply


class FinishedRun:
    """A run that has ended, from the files of all nodes on this disk."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run.id
        self._record = run
        self._folder = _whole(run.folder)

    @property
    def alive(self) -> bool:
        """Return whether the run is still running."""
        return False

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield all events."""
        since: float | None = None
        # After a failover, the later leaders have samples of their own.
        heirs = [part for part in self._parts()[1:] if os.path.exists(os.path.join(part, event_cursor.FILES[1]))]
        for folder in (self._folder, *heirs):
            newest = since or 0.0
            cursor: event_cursor.EventCursor | None = await asyncio.to_thread(event_cursor.begin, folder)
            while cursor is not None:
                lines, cursor = await asyncio.to_thread(event_cursor.part, folder, cursor)
                for line in lines.splitlines():
                    with contextlib.suppress(msgspec.MsgspecError):
                        event = events.decode(line)
                        if since is None or event.time > since:
                            newest = max(newest, event.time)
                            yield event
                await asyncio.sleep(0)
            since = newest

    def _parts(self) -> list[str]:
        return [self._folder, *sorted(glob.glob(os.path.join(glob.escape(self._folder), "node_*")))]

    def _folders(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for part in self._parts():
            found.update(log_reader.folders(part))
        return found

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = log_reader.PART) -> LogPart:
        """Return a part of a rank's output."""
        return await asyncio.to_thread(lambda: log_reader.part(self._folders().get(rank), stream, start, size))

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        """Return the lines of output that contain a text."""

        def look() -> list[SearchResult]:
            there = {rank: path for rank, path in self._folders().items() if ranks is None or rank in ranks}
            return log_reader.search(there, text, most)

        return await asyncio.to_thread(look)

    async def why(self) -> WhyAnswer:
        """Return why the run is stalled or ended."""
        return await asyncio.to_thread(self._why)

    def _why(self) -> WhyAnswer:
        data = postmortem.read(self._record)
        return WhyAnswer(
            report=postmortem.report(data),
            verdicts=tuple(verdict.text for verdict in data.verdicts),
            stacks=self._stacks(),
        )

    def _stacks(self) -> dict[int, str]:
        """Return the stacks of the last stall."""
        paths = glob.glob(os.path.join(glob.escape(self._folder), "**", "stall_*", "evidence.json"), recursive=True)
        for path in sorted(paths, key=os.path.getmtime, reverse=True):
            with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
                return _stacks(msgspec.json.decode(file.read(), type=Evidence))
        return {}


class RemoteRun(FinishedRun):
    """A run on another host, from files on a shared disk: one second late, as long as it writes any."""

    @property
    def alive(self) -> bool:
        """Return whether the run is still running."""
        return _current(self._record).ended is None

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield all events."""
        end, last_line = (0, 0), time.monotonic()
        while time.monotonic() - last_line < _GIVE_UP:
            lives = await asyncio.to_thread(lambda: self.alive)
            cursor: event_cursor.EventCursor | None = await asyncio.to_thread(event_cursor.further, self._folder, end)
            if cursor is not None and cursor.end != end:
                end, last_line = cursor.end, time.monotonic()
            while cursor is not None:
                lines, cursor = await asyncio.to_thread(event_cursor.part, self._folder, cursor)
                for line in lines.splitlines():
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield events.decode(line)
            if not lives:
                return
            await asyncio.sleep(_POLL_INTERVAL)


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


def _stacks(evidence: Evidence) -> dict[int, str]:
    return {rank.rank: stacks.text_of(rank.threads) or rank.note for rank in evidence.ranks}


def _no_answer(run: RunRecord) -> LaunchError:
    return LaunchError(
        f"{run.id} does not answer",
        details=[f"its agent is process {run.pid} on {run.host or 'this host'}"],
        fix=f"phalanx why --pid {run.pid}",
    )


def _current(run: RunRecord) -> RunRecord:
    """Return the current record: the folder moves when the node joins."""
    found = run_folder.read(run.folder)
    if found is not None:
        return found
    for other in run_folder.all_runs(run_folder.home(environment())):
        if (other.pid, other.pid_started) == (run.pid, run.pid_started):
            return other
    return run


def _whole(folder: str) -> str:
    """Return the folder of the whole run, if the leader writes to the same disk; else of this node's part."""
    above = os.path.dirname(folder)
    inside = os.path.basename(folder).startswith("node_") and os.path.exists(os.path.join(above, "run.json"))
    return above if inside else folder


def _last(folder: str) -> AnyEvent | None:
    """Return the last event if it is the end of the run."""
    with contextlib.suppress(OSError), open(os.path.join(folder, "events.jsonl"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(msgspec.MsgspecError):
                event = events.decode(line)
                return event if isinstance(event, events.RunEnded) else None
    return None
