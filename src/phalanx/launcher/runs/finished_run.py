"""A run without an agent on this host, from its files: one that has ended, or one of another host on a shared disk."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.diagnose.evidence import Evidence
from phalanx.launcher.evidence import stacks
from phalanx.launcher.output import log_reader
from phalanx.launcher.runs import event_cursor, postmortem, recorded_metrics, run_folder
from phalanx.launcher.runs.run_folder import RunRecord
from phalanx.watch.source import LogPart, SearchResult, Stream, WhyAnswer

_POLL_INTERVAL = 1.0  # seconds between two reads of files that another host writes
_GIVE_UP = 600.0  # seconds without a new line: whether the run still exists is unknown
_METRICS = 1 << 22  # bytes that are folded in about a second: a browser waits for its page


class FinishedRun:
    """A run that has ended, from the files of all nodes on this disk."""

    def __init__(self, run: RunRecord, *, most_metrics: int = _METRICS) -> None:
        self.run = run.id
        self._most_metrics = most_metrics  # bytes of metrics.jsonl; of a larger one the sampled metrics are used
        self._record = run
        self._folder = _whole(run.folder)

    @property
    def alive(self) -> bool:
        """Return whether the run is still running."""
        return False

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield all events, with the metrics of every step."""
        async for event in recorded_metrics.merged(self._folder, self._logged(), most=self._most_metrics):
            yield event

    async def _logged(self) -> AsyncIterator[AnyEvent]:
        since: float | None = None
        # After a failover, the later leaders have their own samples.
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
                return stacks_by_rank(msgspec.json.decode(file.read(), type=Evidence))
        return {}


class RemoteRun(FinishedRun):
    """A run on another host, from files on a shared disk: one second late, while it writes any."""

    @property
    def alive(self) -> bool:
        """Return whether the run is still running."""
        return current_record(self._record).ended is None

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


def stacks_by_rank(evidence: Evidence) -> dict[int, str]:
    """Return the stacks of every rank as text, or why there are none."""
    return {rank.rank: stacks.text_of(rank.threads) or rank.note for rank in evidence.ranks}


def current_record(run: RunRecord) -> RunRecord:
    """Return the current record: the folder moves when the node joins."""
    found = run_folder.read(run.folder)
    if found is not None:
        return found
    for other in run_folder.all_runs(run_folder.home(environment())):
        if (other.pid, other.pid_started) == (run.pid, run.pid_started):
            return other
    return run


def _whole(folder: str) -> str:
    """Return the folder of the whole run, if the leader writes to the same disk; otherwise of this node's part."""
    above = os.path.dirname(folder)
    inside = os.path.basename(folder).startswith("node_") and os.path.exists(os.path.join(above, "run.json"))
    return above if inside else folder
