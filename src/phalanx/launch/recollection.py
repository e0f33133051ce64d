"""What a run has left in its folder: all that happened and was measured, in order; and the end of what ranks wrote.

    record = recollection.at("/data/runs/train-1115-101500-ab12")
    for event in recollection.events_of(record): …

It goes for a run that lives as well: then it is what has happened so far.
"""

from __future__ import annotations

import contextlib
import glob
import heapq
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from phalanx.contract import events
from phalanx.diagnose.verdict import Verdict
from phalanx.launch.runfolder import RunRecord

METRICS = "metrics.jsonl"  # of a training that has no folder for checkpoints
_OURS = frozenset(("step", "epoch", "time"))
_STACKS = 1 << 18  # bytes of one stall
_END = 1 << 18  # bytes of a file that are worth reading when only its end is asked for


def at(folder: str) -> RunRecord | None:
    """The run whose folder that is, wherever it lies now. None: it is no run's."""
    for part in (folder, os.path.join(folder, "node_0")):
        with contextlib.suppress(OSError, ValueError, TypeError), open(os.path.join(part, "run.json")) as file:
            return replace(RunRecord(**json.load(file)), folder=os.path.abspath(part))
    return None


def leading(record: RunRecord) -> RunRecord:
    """The part of node 0, which has seen all ranks, where it lies on this disk; else what there is."""
    beside = os.path.join(os.path.dirname(record.folder), "node_0")
    if record.node and os.path.basename(record.folder).startswith("node_") and os.path.isdir(beside):
        return at(beside) or record
    return record


def events_of(record: RunRecord) -> Iterator[events.AnyEvent]:
    """As far as they can be read: what another version has written, or was cut off, is left out."""
    happened = _read(os.path.join(record.folder, "events.jsonl"))
    sights = _read(os.path.join(record.folder, "sights.jsonl"))
    streams = [happened, sights]
    early = list(itertools.islice(sights, 100))
    if not any(isinstance(event, events.Measured) for event in early):
        # a run of before, or one whose training is not heard: its own file may say more
        streams.append(_metrics(os.path.join(record.folder, METRICS)))
    streams[1] = itertools.chain(early, sights)
    yield from heapq.merge(*streams, key=attrgetter("time"))


def tail(record: RunRecord, rank: int, stream: str, size: int) -> tuple[str, int]:
    """The end of what a rank wrote in its last attempt, whole lines; and how long all of it is."""
    folder = glob.escape(record.folder)
    places = [
        *glob.glob(os.path.join(folder, "attempt_*", str(rank), f"{stream}.log")),
        *glob.glob(os.path.join(folder, "..", "node_*", "attempt_*", str(rank), f"{stream}.log")),
        *glob.glob(os.path.join(folder, "node_*", "attempt_*", str(rank), f"{stream}.log")),
    ]
    if not places:
        return "", 0
    path = max(places, key=_attempt)
    with contextlib.suppress(OSError):
        whole = os.path.getsize(path)
        text = end(path, size).decode(errors="replace")
        return (text.partition("\n")[2] if whole > size and "\n" in text else text), whole
    return "", 0


def stalls_of(record: RunRecord) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each time that nothing went on: the verdicts, with what shows them, and the stacks of all ranks."""
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


def _attempt(path: str) -> int:
    return _number_of(os.path.dirname(os.path.dirname(path)))


def _stall(path: str) -> int:
    return _number_of(os.path.dirname(path))


def _number_of(folder: str) -> int:
    number = folder.rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _read(path: str) -> Iterator[events.AnyEvent]:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):
                yield events.decode(line)


def _metrics(path: str) -> Iterator[events.AnyEvent]:
    """What a training has written itself, as if it had been measured."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if (found := measured(line)) is not None:
                yield found


def measured(line: bytes) -> events.Measured | None:
    """A line of metrics.jsonl. None: it is none."""
    try:
        said: dict[str, Any] = json.loads(line)
        values = {name: _number(value) for name, value in said.items() if name not in _OURS}
        return events.Measured(
            time=float(said["time"]), step=int(said["step"]), epoch=int(said.get("epoch", 0)), values=values
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(value: object) -> float | None:
    number = float(value)  # type: ignore[arg-type]  # text is "nan" or "inf": whatever else it is, is no line of ours
    return number if math.isfinite(number) else None
