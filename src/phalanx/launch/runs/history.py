"""What a run has left in its folder, for those who come later: read once, in order; and stalls, with all stacks.

    recollection.read(choice.any_run("train-1115"), model.apply)

It goes for a run that lives as well: then it is what has happened so far.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from phalanx.contract import events
from phalanx.launch.runs import run_folder
from phalanx.launch.runs.run_folder import RunRecord

METRICS = "metrics.jsonl"  # of a training that has no folder for checkpoints
_OURS = frozenset(("step", "epoch", "time"))
_MOST = 1 << 24  # bytes of it; of a training that has written more, the sights say enough
_STACKS = 1 << 18  # bytes of one stall
_END = 1 << 18  # bytes of a file that are worth reading when only its end is asked for


def leading(record: RunRecord) -> RunRecord:
    """The part of the node that led, which has seen all ranks, where it lies on this disk; else what there is."""
    inside = os.path.basename(record.folder).startswith("node_")
    return (run_folder.read(os.path.dirname(record.folder)) if inside else None) or record


def read(record: RunRecord, see: Callable[[events.AnyEvent], object]) -> None:
    """As far as it can be read: what another version has written, or was cut off, is left out."""
    import asyncio  # whoever only wants the end of it does not wait for this, nor for what reads it all

    asyncio.run(_read(record, see))


async def _read(record: RunRecord, see: Callable[[events.AnyEvent], object]) -> None:
    """What a training has written itself has every step, and sights one a second: where it is there, it is taken."""
    from phalanx.launch.runs import event_cursor, views

    told = list(_told(os.path.join(record.folder, event_cursor.FILES[1])))
    path = os.path.join(record.folder, METRICS)
    metrics = _metrics(path, told) if not told or _size(path) <= _MOST else iter(())
    own = next(metrics, None)
    doubled = own is not None
    async for event in views.FinishedRun(record).events():
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


def _told(path: str) -> Iterator[events.MetricsMeasured]:
    """What was measured, among the sights."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(b'{"event":"metrics"'):
                with contextlib.suppress(msgspec.MsgspecError):
                    event = events.decode(line)
                    if isinstance(event, events.MetricsMeasured):
                        yield event


def stalls_of(record: RunRecord) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each time that nothing went on: the verdicts, with what shows them, and the stacks of all ranks."""
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
    """The last bytes of a file; nothing of one that is not there."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read()
    return b""


def _stall(path: str) -> int:
    number = os.path.dirname(path).rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _metrics(path: str, told: list[events.MetricsMeasured]) -> Iterator[events.MetricsMeasured]:
    """What a training has written itself, as if it had been measured; with what else was told of it."""
    more = {event.step: event for event in told}
    last: events.MetricsMeasured | None = None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            found = measured(line)
            if found is None:
                continue
            last = more.get(found.step, last)
            if last is not None:
                found = msgspec.structs.replace(found, total=last.total, samples=last.samples)
            yield found


def measured(line: bytes) -> events.MetricsMeasured | None:
    """A line of metrics.jsonl. None: it is none."""
    try:
        said: dict[str, Any] = json.loads(line)
        values = {name: _number(value) for name, value in said.items() if name not in _OURS}
        return events.MetricsMeasured(
            time=float(said["time"]), step=int(said["step"]), epoch=int(said.get("epoch", 0)), values=values
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _number(value: object) -> float | None:
    number = float(value)  # type: ignore[arg-type]  # text is "nan" or "inf": whatever else it is, is no line of ours
    return number if math.isfinite(number) else None
