"""Reads the history of a run from its folder: all events in order, and stalls with all stacks.

    history.read(choice.any_run("train-1115"), model.apply)

For a live run, it returns what has happened so far.
"""

from __future__ import annotations

import contextlib
import glob
import heapq
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from phalanx.contract import events
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord

_METRICS_PREFIX = b'{"event":"%b"' % str(events.MetricsMeasured.__struct_config__.tag).encode()
METRICS = "metrics.jsonl"  # written by a training run that has no checkpoint folder
_OURS = frozenset(("step", "epoch", "time", "rank"))
_LATE = 5000  # lines: what other ranks log is written some seconds later than lines of rank 0
_MOST = 1 << 24  # bytes of it: if there is more, samples.jsonl is sufficient
_STACKS = 1 << 18  # bytes per stall
_END = 1 << 18  # bytes read by default by `end`


def leading(record: RunRecord) -> RunRecord:
    """Return the record of the leader's part, which has all ranks, if it is on this disk; else `record`."""
    inside = os.path.basename(record.folder).startswith("node_")
    return (run_folder.read(os.path.dirname(record.folder)) if inside else None) or record


def read(record: RunRecord, see: Callable[[events.AnyEvent], object]) -> None:
    """Call `see` with every event. Skips unreadable ones: truncated, or written by another version."""
    import asyncio  # slow to import, and `end` does not need it

    asyncio.run(_read(record, see))


async def _read(record: RunRecord, see: Callable[[events.AnyEvent], object]) -> None:
    """Read metrics from metrics.jsonl if it exists: it has every step, samples.jsonl one per second."""
    from phalanx.launcher.runs import event_cursor
    from phalanx.launcher.runs.finished_run import FinishedRun

    reported = list(_reported(os.path.join(record.folder, event_cursor.FILES[1])))
    path = os.path.join(record.folder, METRICS)
    metrics = _metrics(path, reported) if not reported or _size(path) <= _MOST else iter(())
    own = next(metrics, None)
    doubled = own is not None
    async for event in FinishedRun(record).events():
        while own is not None and own.time <= event.time:
            see(own)
            own = next(metrics, None)
        if not (doubled and isinstance(event, events.MetricsMeasured)):
            see(event)
    while own is not None:
        see(own)
        own = next(metrics, None)


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0


def _reported(path: str) -> Iterator[events.MetricsMeasured]:
    """Yield the metrics in samples.jsonl."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(_METRICS_PREFIX):
                with contextlib.suppress(msgspec.MsgspecError):
                    event = events.decode(line)
                    if isinstance(event, events.MetricsMeasured):
                        yield event


def stalls_of(record: RunRecord) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the stalls of a run: verdicts with details, and the stacks of all ranks."""
    from phalanx.diagnose.verdict import Verdict

    for path in sorted(glob.glob(os.path.join(glob.escape(record.folder), "stall_*", "verdict.json")), key=_stall):
        texts: list[str] = []
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            for verdict in msgspec.json.decode(file.read(), type=list[Verdict]):
                fix = [f"fix: {verdict.fix}"] if verdict.fix else []
                texts.append("\n".join([verdict.text, *(f"  {line}" for line in (*verdict.details, *fix))]))
        stacks = ""
        with contextlib.suppress(OSError), open(os.path.join(os.path.dirname(path), "stacks.txt"), "rb") as file:
            stacks = file.read(_STACKS).decode(errors="replace")
        if texts or stacks:
            yield tuple(texts), stacks


def end(path: str, size: int = _END) -> bytes:
    """Return the last bytes of a file. Empty if it does not exist."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read()
    return b""


def _stall(path: str) -> int:
    number = os.path.dirname(path).rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _metrics(path: str, reported: list[events.MetricsMeasured]) -> Iterator[events.MetricsMeasured]:
    """Yield the lines of metrics.jsonl as events, completed from those that were reported for the same step."""
    more = {event.step: event for event in reported}
    last: events.MetricsMeasured | None = None
    for found in _in_order(path):
        last = more.get(found.step, last)
        if last is None:
            yield found
            continue
        # The file counts epochs from 0.
        epoch = min(found.epoch + 1, last.epochs) if last.epochs else found.epoch
        yield msgspec.structs.replace(found, epoch=epoch, epochs=last.epochs, total=last.total, samples=last.samples)


def _in_order(path: str) -> Iterator[events.MetricsMeasured]:
    """Yield the lines of metrics.jsonl by time."""
    waiting: list[tuple[float, int, events.MetricsMeasured]] = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for number, line in enumerate(file):
            if (found := measured(line)) is not None:
                heapq.heappush(waiting, (found.time, number, found))
            if len(waiting) > _LATE:
                yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def measured(line: bytes) -> events.MetricsMeasured | None:
    """Parse a line of metrics.jsonl. None if it is malformed."""
    try:
        found: dict[str, Any] = json.loads(line)
        suffix = f"/rank {int(found['rank'])}" if "rank" in found else ""
        values = {f"{name}{suffix}": _number(value) for name, value in found.items() if name not in _OURS}
        return events.MetricsMeasured(
            time=float(found["time"]), step=int(found["step"]), epoch=int(found.get("epoch", 0)), values=values
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _number(value: object) -> float | None:
    number = float(value)  # type: ignore[arg-type]  # text is "nan" or "inf"; anything else is malformed
    return number if math.isfinite(number) else None
