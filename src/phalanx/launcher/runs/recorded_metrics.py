"""The metrics of a run from `metrics.jsonl`, which has every step; `samples.jsonl` has a few per second at most.

async for event in recorded_metrics.merged(folder, events_of_the_other_files):
    ...
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from phalanx.contract import events
from phalanx.contract.events import AnyEvent
from phalanx.launcher.runs import event_cursor

FILE = "metrics.jsonl"  # written by a training run that has no checkpoint folder
_PREFIX = b'{"event":"%b"' % str(events.MetricsMeasured.__struct_config__.tag).encode()
_OURS = frozenset(("step", "epoch", "time", "rank"))
_LATE = 5000  # lines: what other ranks log is written some seconds later than lines of rank 0
_PAUSE_EVERY = 500  # events, after which other tasks of the event loop get their turn


async def merged(folder: str, others: AsyncIterator[AnyEvent], *, most: int) -> AsyncIterator[AnyEvent]:
    """Yield `others`, with the metrics of metrics.jsonl instead of the sampled ones, if it exists.

    `most`: bytes. If the file is larger, and there are sampled ones, it is not read.
    """
    import asyncio  # slow to import, and `parse` does not need it

    metrics = await asyncio.to_thread(_open, folder, most)
    own = next(metrics, None)
    exact = own is not None
    count = 0
    async for event in others:
        while own is not None and own.time <= event.time:
            yield own
            own = next(metrics, None)
            count += 1
            if count % _PAUSE_EVERY == 0:
                await asyncio.sleep(0)
        if not (exact and isinstance(event, events.MetricsMeasured)):
            yield event
    while own is not None:
        yield own
        own = next(metrics, None)


def _open(folder: str, most: int) -> Iterator[events.MetricsMeasured]:
    path = os.path.join(folder, FILE)
    reported = list(_reported(os.path.join(folder, event_cursor.FILES[1])))
    return _completed(path, reported) if not reported or _size(path) <= most else iter(())


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0


def _reported(path: str) -> Iterator[events.MetricsMeasured]:
    """Yield the metrics in samples.jsonl."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(_PREFIX):
                with contextlib.suppress(msgspec.MsgspecError):
                    event = events.decode(line)
                    if isinstance(event, events.MetricsMeasured):
                        yield event


def _completed(path: str, reported: list[events.MetricsMeasured]) -> Iterator[events.MetricsMeasured]:
    """Yield the lines of metrics.jsonl as events, completed from those that were reported for the same step."""
    more = {event.step: event for event in reported}
    last = reported[0] if reported else None
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
            if (found := parse(line)) is not None:
                heapq.heappush(waiting, (found.time, number, found))
            if len(waiting) > _LATE:
                yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def parse(line: bytes) -> events.MetricsMeasured | None:
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
