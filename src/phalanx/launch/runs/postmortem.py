"""What a run that has ended died of, and what it had survived: read from its folder, which is all that is left."""

from __future__ import annotations

import contextlib
import glob
import os
import time
from dataclasses import dataclass, field, replace

import msgspec

from phalanx.contract import events
from phalanx.diagnose.verdict import Verdict
from phalanx.launch.runs import root_cause
from phalanx.launch.runs.run_folder import RunRecord

_TAIL = 1 << 16  # bytes of a log that are worth reading


@dataclass
class PostmortemData:
    """Of one run, on this disk."""

    record: RunRecord
    happened: list[events.AnyEvent] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    deaths: list[root_cause.ProcessFailure] = field(default_factory=list)


def read(record: RunRecord) -> PostmortemData:
    remains = PostmortemData(record)
    with contextlib.suppress(OSError), open(os.path.join(record.folder, "events.jsonl"), "rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):  # of another version, or cut off in the middle
                remains.happened.append(events.decode(line))
    told: dict[tuple[object, ...], Verdict] = {}  # what lasts is told again and again
    for path in sorted(glob.glob(os.path.join(glob.escape(record.folder), "stall_*", "verdict.json")), key=_number):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            for verdict in msgspec.json.decode(file.read(), type=list[Verdict]):
                told[verdict.kind, verdict.ranks, verdict.place] = verdict
    remains.verdicts = list(told.values())
    remains.deaths = _deaths(remains)
    return remains


def _deaths(remains: PostmortemData) -> list[root_cause.ProcessFailure]:
    """Of the last attempt: those that nobody has taken the place of."""
    dead: dict[int, tuple[events.WorkerExited, float]] = {}  # by rank; and when it was told to stop
    spares: set[int] = set()
    told = 0.0
    for event in remains.happened:
        match event:
            case events.AttemptStarted():
                told = 0.0
                dead.clear()
            case events.Recovered():
                dead.clear()
            case events.Stopping():
                told = told or event.time
            case events.WorkerStarted(spare=True):
                spares.add(event.pid)
            case events.WorkerStarted() | events.RankChanged():
                spares.discard(event.pid)
                dead.pop(event.rank, None)
            case events.WorkerExited() if event.pid not in spares:
                dead[event.rank] = (event, told)
    return [
        replace(_death(remains.record.folder, event, told=told), hung=event.hung)
        for event, told in dead.values()
        if event.code
    ]


def _number(path: str) -> int:
    """Of a stall."""
    number = os.path.basename(os.path.dirname(path)).rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _failure(remains: PostmortemData) -> events.WorkerFailed | None:
    """What was found to be the cause when it ended: it may be a rank of another node."""
    found = [event for event in remains.happened if isinstance(event, events.WorkerFailed)]
    return found[-1] if found and found[-1].attempt == _last_attempt(remains) else None


def _death(folder: str, event: events.WorkerExited | events.WorkerFailed, *, told: float) -> root_cause.ProcessFailure:
    place = _place(folder, event.attempt, event.rank)
    # Where both streams were shown in one place, they are in stdout.log.
    stderr = _text(os.path.join(place, "stderr.log")) or _text(os.path.join(place, "stdout.log"))
    return root_cause.ProcessFailure(
        rank=event.rank,
        code=event.code,
        time=event.time,
        stopped=told > 0,
        told=told,
        error=_text(os.path.join(place, "error.json")),
        stderr=stderr.splitlines()[-60:],
    )


def _place(folder: str, attempt: int, rank: int) -> str:
    """Of a rank of this node, or of another one that shares the disk."""
    inside = os.path.join(f"attempt_{attempt}", str(rank))
    parts = glob.glob(os.path.join(glob.escape(folder), "node_*", inside))
    here = os.path.join(folder, inside)
    return here if os.path.isdir(here) or not parts else parts[0]


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return file.read().decode(errors="replace")
    return ""


def first(remains: PostmortemData) -> str:
    """The first cause in one line; empty: there is none, or nobody knows."""
    failure = _failure(remains)
    if failure is not None:
        return failure.summary
    death = root_cause.first_cause(remains.deaths)
    return root_cause.summary(death) if death is not None else ""


def report(remains: PostmortemData) -> str:
    """For a terminal."""
    record = remains.record
    lines = [_head(record)]
    death, failure = None, _failure(remains)
    if failure is not None:
        death = next((each for each in remains.deaths if each.rank == failure.rank), None)
        if death is None and os.path.isdir(_place(record.folder, failure.attempt, failure.rank)):
            death = _death(record.folder, failure, told=0.0)
            if death.code > 128:  # as a shell says it
                death = replace(death, code=128 - death.code)
        death = replace(death, blame=failure.blame) if death is not None else None
    elif record.code or record.code is None:
        death = root_cause.first_cause(remains.deaths)
    if death is not None:
        folder = _place(record.folder, _last_attempt(remains), death.rank)
        tail = [line for line in _text(os.path.join(folder, "stdout.log")).splitlines()[-5:] if line.strip()]
        block = root_cause.block(death, tail=tail, folder=folder)
        lines.append(root_cause.counted(block, root_cause.count(remains.deaths) - 1))
    elif failure is not None:
        lines += [failure.summary, "  on another node: its part of the run has all that is known"]
    elif record.state == "killed":
        lines += _unfinished(remains)
    for verdict in remains.verdicts:
        lines.append(f"it had stood still: {verdict.text}")
        lines += [f"  {detail}" for detail in verdict.details]
    lines += _survived(remains)
    notes = [event.text for event in remains.happened if isinstance(event, events.NoteEvent)]
    if notes and (record.code or death is None):
        lines += ["the last that was said:", *(f"  {note.splitlines()[0]}" for note in notes[-5:])]
    if record.node:
        lines.append(f"this is the part of node {record.node}: the node that led has the verdicts about all of them")
    return "\n".join([*lines, f"everything: {record.folder}"])


def _head(record: RunRecord) -> str:
    if record.state == "killed":
        return f"{record.id}: its agent (process {record.pid}) was killed, and could not say why"
    if record.ended is None:
        return f"{record.id}: it runs on {record.host}, if it runs"
    lasted = record.ended - record.started
    return f"{record.id}: {record.state} after {lasted:.0f} s, at {_clock(record.ended)}"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _last_attempt(remains: PostmortemData) -> int:
    return max((event.attempt for event in remains.happened if isinstance(event, events.AttemptStarted)), default=0)


def _unfinished(remains: PostmortemData) -> list[str]:
    alive: dict[int, int] = {}  # pid -> rank
    for event in remains.happened:
        match event:
            case events.WorkerStarted():
                alive[event.pid] = event.rank
            case events.RankChanged():
                alive[event.pid] = event.rank
            case events.WorkerExited():
                alive.pop(event.pid, None)
    ranks = ", ".join(map(str, sorted(alive.values())))
    lines = [f"rank{'s' if len(alive) > 1 else ''} {ranks} ran by then" if alive else "no rank ran by then"]
    if remains.happened:
        lines.append(f"the last thing that it wrote down was at {_clock(remains.happened[-1].time)}")
    lines.append("who does that: kill -9, a scheduler at its time limit, the kernel when memory is short (dmesg)")
    return lines


def _survived(remains: PostmortemData) -> list[str]:
    faults = [event for event in remains.happened if isinstance(event, events.FaultEvent) and event.recovery != "stop"]
    if not faults:
        return []
    lines = [f"it had survived {len(faults)} fault{'s' if len(faults) > 1 else ''}:"]
    shown = [f"  {_clock(fault.time)} rank {fault.rank}: {fault.reason}" for fault in faults]
    return [*lines, *(shown if len(shown) <= 8 else [*shown[:4], f"  … {len(shown) - 8} more", *shown[-4:]])]
