"""A run as those see it who look at it: from its agent while it lives, and from its folder ever after."""

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
from phalanx.launch.hangs import stacks
from phalanx.launch.ipc import control_socket
from phalanx.launch.output import log_reader
from phalanx.launch.runs import event_cursor, postmortem, run_folder
from phalanx.launch.runs.run_folder import RunRecord
from phalanx.watch.source import LogPart, SearchResult, Source, Stream, WhyAnswer

_PATIENCE = 20.0  # seconds for all nodes to say what they know
_AGAIN = 0.2  # seconds between two tries to reach an agent
_RECENT = 4096  # lines by which it is known what was given already
_LONGEST = 1 << 26  # bytes of a line
_LOOK = 1.0  # seconds between two looks at files that another machine writes
_SILENCE = 600.0  # seconds in which it writes nothing: then nobody knows whether it still runs

_Kind = TypeVar("_Kind")


def of(run: RunRecord) -> Source:
    if run.alive:
        return LiveRun(run)
    return FinishedRun(run) if run.here or run.ended is not None else RemoteRun(run)


class LiveRun:
    """By its agent on this machine, whichever node that is."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run.id
        self._record = run
        self._since: float | None = None  # when the newest of what was given happened
        self._given: dict[int, None] = {}  # in order
        self._begun = False  # how it began was given

    @property
    def alive(self) -> bool:
        self._record = _now(self._record)
        return self._record.alive

    async def events(self) -> AsyncIterator[AnyEvent]:
        """When the connection breaks, or another node leads, it is asked again from there on."""
        tries = int(control_socket.SOON / _AGAIN)
        while await asyncio.to_thread(lambda: self.alive):
            try:
                sock, early = await _aside(self._call)
            except LaunchError:
                tries -= 1
                # It has not opened its desk yet; or has closed it, and is about to end.
                if not tries and self._since is None:
                    raise
            else:
                async for event in self._lines(sock, early=early):
                    yield event
                    if isinstance(event, events.RunEnded):
                        return
            await asyncio.sleep(_AGAIN)
        async for event in self._rest():
            yield event

    async def _rest(self) -> AsyncIterator[AnyEvent]:
        """Its agent is gone: what it had written, and had no time to tell."""
        folder = self._record.folder
        if os.path.basename(folder).startswith("node_"):  # what was told was of the node that led; here is its own
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
            sock.settimeout(_PATIENCE)
            greeting = wire.receive(sock)
            if greeting is None or greeting[0].get("is") != "watch":
                why = greeting[0].get("why", "") if greeting is not None else "it has hung up"
                raise LaunchError(f"{self.run} cannot be watched: {why}", fix="phalanx ps shows what runs here")
            sock.setblocking(False)
            return sock, bool(greeting[0].get("early"))
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise _silent(self._record) from error
            raise

    async def _lines(self, sock: socket.socket, *, early: bool) -> AsyncIterator[AnyEvent]:
        """`early`: a node's own, until it has joined; what comes later is told from the beginning."""
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_LONGEST)
        try:
            with contextlib.suppress(OSError, ValueError):
                while (line := await reader.readline()).endswith(b"\n"):
                    if not self._new(line):
                        continue
                    with contextlib.suppress(msgspec.MsgspecError):  # of an agent of another version
                        event = events.decode(line)
                        if isinstance(event, events.RunStarted):
                            if self._begun:
                                continue  # another node leads now, and tells how it began itself
                            self._begun = not early
                        if not early:
                            self._since = max(self._since or 0.0, event.time)
                        yield event
        finally:
            writer.transport.abort()

    def _new(self, line: bytes) -> bool:
        """What has just happened may be told twice: as the past, and as it happens."""
        mark = hash(line)
        if mark in self._given:
            return False
        self._given[mark] = None
        if len(self._given) > _RECENT:
            del self._given[next(iter(self._given))]
        return True

    async def log(self, rank: int, stream: Stream, *, start: int | None = None, size: int = log_reader.PART) -> LogPart:
        if not self.alive:
            return await FinishedRun(self._record).log(rank, stream, start=start, size=size)
        said = await self._ask({"ask": "log", "rank": rank, "stream": stream, "start": start, "size": size})
        return self._read(said, LogPart)

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        if not self.alive:
            return await FinishedRun(self._record).search(text, ranks, most=most)
        wanted = None if ranks is None else list(ranks)
        said = await self._ask({"ask": "search", "text": text, "ranks": wanted, "most": most})
        return self._read(said.get("found"), list[SearchResult])

    async def why(self) -> WhyAnswer:
        if not self.alive:
            return await FinishedRun(self._record).why()
        said = await self._ask({"ask": "why"})
        evidence = msgspec.convert(said["evidence"], Evidence)
        return WhyAnswer(
            report=str(said["report"]),
            verdicts=tuple(str(verdict["text"]) for verdict in said["verdicts"]),
            stacks=_stacks(evidence),
        )

    def _read(self, said: object, kind: type[_Kind]) -> _Kind:
        """What another node has written may be anything."""
        try:
            return msgspec.convert(said, kind)
        except msgspec.ValidationError as error:
            raise LaunchError(f"{self.run} cannot be asked: what it says cannot be read: {error}") from None

    async def _ask(self, question: wire.Message) -> dict[str, Any]:
        return await _aside(lambda: self._asked(question))

    def _asked(self, question: wire.Message) -> dict[str, Any]:
        with control_socket.call(self._record, question) as line:
            line.settimeout(_PATIENCE)
            try:
                received = wire.receive(line)
            except OSError as error:
                raise _silent(self._record) from error
        if received is None or received[0].get("is") != question["ask"]:
            why = received[0].get("why", "") if received is not None else "it has ended meanwhile"
            raise LaunchError(f"{self.run} cannot be asked: {why}", fix=f"phalanx why {self.run}")
        return received[0]


class FinishedRun:
    """By what it has left behind: on this disk, of all nodes that wrote there."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run.id
        self._record = run
        self._folder = _whole(run.folder)

    @property
    def alive(self) -> bool:
        return False

    async def events(self) -> AsyncIterator[AnyEvent]:
        since: float | None = None
        # Whoever has led after the first has sights of its own.
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
        return await asyncio.to_thread(lambda: log_reader.part(self._folders().get(rank), stream, start, size))

    async def search(self, text: str, ranks: Sequence[int] | None = None, *, most: int = 200) -> list[SearchResult]:
        def look() -> list[SearchResult]:
            there = {rank: path for rank, path in self._folders().items() if ranks is None or rank in ranks}
            return log_reader.search(there, text, most)

        return await asyncio.to_thread(look)

    async def why(self) -> WhyAnswer:
        return await asyncio.to_thread(self._why)

    def _why(self) -> WhyAnswer:
        remains = postmortem.read(self._record)
        return WhyAnswer(
            report=postmortem.report(remains),
            verdicts=tuple(verdict.text for verdict in remains.verdicts),
            stacks=self._stacks(),
        )

    def _stacks(self) -> dict[int, str]:
        """Of the last time that it stood still."""
        paths = glob.glob(os.path.join(glob.escape(self._folder), "**", "stall_*", "evidence.json"), recursive=True)
        for path in sorted(paths, key=os.path.getmtime, reverse=True):
            with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
                return _stacks(msgspec.json.decode(file.read(), type=Evidence))
        return {}


class RemoteRun(FinishedRun):
    """On another machine, by files on a disk that is shared: a second late, and as long as anything is written."""

    @property
    def alive(self) -> bool:
        return _now(self._record).ended is None

    async def events(self) -> AsyncIterator[AnyEvent]:
        end, heard = (0, 0), time.monotonic()
        while time.monotonic() - heard < _SILENCE:
            lives = await asyncio.to_thread(lambda: self.alive)
            cursor: event_cursor.EventCursor | None = await asyncio.to_thread(event_cursor.further, self._folder, end)
            if cursor is not None and cursor.end != end:
                end, heard = cursor.end, time.monotonic()
            while cursor is not None:
                lines, cursor = await asyncio.to_thread(event_cursor.part, self._folder, cursor)
                for line in lines.splitlines():
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield events.decode(line)
            if not lives:
                return
            await asyncio.sleep(_LOOK)


async def _aside(work: Callable[[], _Kind]) -> _Kind:
    """In a thread that nobody waits for at the end: who wants to leave does not wait for one that does not answer."""
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
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="phalanx-asks", daemon=True).start()
    return await done


def _stacks(evidence: Evidence) -> dict[int, str]:
    return {rank.rank: stacks.text_of(rank.threads) or rank.note for rank in evidence.ranks}


def _silent(run: RunRecord) -> LaunchError:
    return LaunchError(
        f"{run.id} does not answer",
        details=[f"its agent is process {run.pid} on {run.host or 'this machine'}"],
        fix=f"phalanx why --pid {run.pid}",
    )


def _now(run: RunRecord) -> RunRecord:
    """As it is recorded now: its folder moves when it joins others."""
    found = run_folder.read(run.folder)
    if found is not None:
        return found
    for other in run_folder.all_runs(run_folder.home(environment())):
        if (other.pid, other.pid_started) == (run.pid, run.pid_started):
            return other
    return run


def _whole(folder: str) -> str:
    """Of a node's part, what it is a part of, where the node that leads has written on the same disk."""
    above = os.path.dirname(folder)
    inside = os.path.basename(folder).startswith("node_") and os.path.exists(os.path.join(above, "run.json"))
    return above if inside else folder


def _last(folder: str) -> AnyEvent | None:
    """How it has ended, by its own last word."""
    with contextlib.suppress(OSError), open(os.path.join(folder, "events.jsonl"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(msgspec.MsgspecError):
                event = events.decode(line)
                return event if isinstance(event, events.RunEnded) else None
    return None
