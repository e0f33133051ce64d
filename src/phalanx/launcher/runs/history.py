"""Reads the history of a run from its folder: all events in order, and stalls with all stacks.

    history.read(choice.any_run("train-1115"), model.apply)

For a live run, it returns what has happened so far.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator

import msgspec

from phalanx.contract import events
from phalanx.launcher.runs import run_folder
from phalanx.launcher.runs.run_folder import RunRecord

_METRICS = 1 << 24  # bytes of metrics.jsonl
_STACKS = 1 << 18  # bytes per stall
_END = 1 << 18  # bytes read by default by `end`


def leader_record(record: RunRecord) -> RunRecord:
    """Return the record of the leader's part, which has all ranks, if it is on this disk; else `record`."""
    inside = os.path.basename(record.folder).startswith("node_")
    return (run_folder.read(os.path.dirname(record.folder)) if inside else None) or record


def read(record: RunRecord, see: Callable[[events.AnyEvent], object]) -> None:
    """Call `see` with every event. Skips unreadable ones: truncated, or written by another version."""
    import asyncio  # slow to import, and `end` does not need it

    asyncio.run(_read(record, see))


async def _read(record: RunRecord, see: Callable[[events.AnyEvent], object]) -> None:
    from phalanx.launcher.runs.finished_run import FinishedRun

    async for event in FinishedRun(record, most_metrics=_METRICS).events():
        see(event)


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
