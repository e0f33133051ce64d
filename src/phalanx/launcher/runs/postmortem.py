"""Explains why a run ended and which faults it survived, from its run folder."""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from phalanx.contract import events
from phalanx.contract.exit_codes import stopped_by
from phalanx.diagnose.verdict import Verdict
from phalanx.launcher.runs import failure_report, root_cause
from phalanx.launcher.runs.run_folder import RunRecord

_TAIL = 1 << 16  # bytes read from the end of a log


@dataclass
class PostmortemData:
    """The content of a run folder."""

    record: RunRecord
    history: list[events.AnyEvent] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    deaths: list[root_cause.ProcessFailure] = field(default_factory=list)


def read(record: RunRecord) -> PostmortemData:
    """Read the folder of a run that has ended."""
    data = PostmortemData(record)
    with contextlib.suppress(OSError), open(os.path.join(record.folder, "events.jsonl"), "rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):  # of another version, or truncated
                data.history.append(events.decode(line))
    verdicts: dict[tuple[object, ...], Verdict] = {}  # a stall that lasts has several dumps
    for path in sorted(glob.glob(os.path.join(glob.escape(record.folder), "stall_*", "verdict.json")), key=_number):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            for verdict in msgspec.json.decode(file.read(), type=list[Verdict]):
                verdicts[verdict.kind, verdict.ranks, verdict.place] = verdict
    data.verdicts = list(verdicts.values())
    data.deaths = _deaths(data)
    return data


def _deaths(data: PostmortemData) -> list[root_cause.ProcessFailure]:
    """Return the failed workers of the last attempt that were not replaced."""
    dead: dict[int, tuple[events.WorkerExited, float]] = {}  # by rank, with the time at which it was asked to stop
    spares: set[int] = set()
    stopping = 0.0
    for event in data.history:
        match event:
            case events.AttemptStarted():
                stopping = 0.0
                dead.clear()
            case events.Recovered():
                dead.clear()
            case events.Stopping():
                stopping = stopping or event.time
            case events.WorkerStarted(spare=True):
                spares.add(event.pid)
            case events.WorkerStarted() | events.RankChanged():
                spares.discard(event.pid)
                dead.pop(event.rank, None)
            case events.WorkerExited() if event.pid not in spares:
                dead[event.rank] = (event, stopping)
    return [
        replace(_death(data.record.folder, event, stop_sent=stopping), hung=event.hung)
        for event, stopping in dead.values()
        if event.code
    ]


def _number(path: str) -> int:
    """Return the number of a stall."""
    number = os.path.basename(os.path.dirname(path)).rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _failure(data: PostmortemData) -> events.WorkerFailed | None:
    """Return the cause that was recorded when the run ended. It may be a rank of another node."""
    found = [event for event in data.history if isinstance(event, events.WorkerFailed)]
    return found[-1] if found and found[-1].attempt == _last_attempt(data) else None


def _death(
    folder: str, event: events.WorkerExited | events.WorkerFailed, *, stop_sent: float
) -> root_cause.ProcessFailure:
    place = _place(folder, event.attempt, event.rank)
    # If both streams went to one terminal or file, both are in stdout.log.
    stderr = _text(os.path.join(place, "stderr.log")) or _text(os.path.join(place, "stdout.log"))
    return root_cause.ProcessFailure(
        rank=event.rank,
        code=event.code,
        time=event.time,
        stopped=stop_sent > 0,
        stop_sent=stop_sent,
        error=_text(os.path.join(place, "error.json")),
        stderr=stderr.splitlines()[-60:],
    )


def _place(folder: str, attempt: int, rank: int) -> str:
    """Return the folder of a rank, of this node or of another with a shared disk."""
    inside = os.path.join(f"attempt_{attempt}", str(rank))
    parts = glob.glob(os.path.join(glob.escape(folder), "node_*", inside))
    here = os.path.join(folder, inside)
    return here if os.path.isdir(here) or not parts else parts[0]


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return file.read().decode(errors="replace")
    return ""


def first(data: PostmortemData) -> str:
    """Return the first cause in one line. Empty if there is none or it is unknown."""
    failure = _failure(data)
    if failure is not None:
        return failure.summary
    death = _first_cause(data)
    return failure_report.summary(death) if death is not None else ""


def _first_cause(data: PostmortemData) -> root_cause.ProcessFailure | None:
    """Return the first failure. None: there is none; errors of ranks after Ctrl-C or a preemption do not count."""
    return None if data.record.preempted or stopped_by(data.record.code) else root_cause.first_cause(data.deaths)


def report(data: PostmortemData) -> str:
    """Return the post-mortem as text for a terminal."""
    record = data.record
    lines = [_head(record)]
    death, failure = None, _failure(data)
    if failure is not None:
        death = next((each for each in data.deaths if each.rank == failure.rank), None)
        if death is None and os.path.isdir(_place(record.folder, failure.attempt, failure.rank)):
            death = _death(record.folder, failure, stop_sent=0.0)
            if death.code > 128:  # a signal, in the convention of shells
                death = replace(death, code=128 - death.code)
        death = replace(death, blame=failure.blame) if death is not None else None
    elif record.code or record.code is None:
        death = _first_cause(data)
    if death is not None:
        folder = _place(record.folder, _last_attempt(data), death.rank)
        tail = [line for line in _text(os.path.join(folder, "stdout.log")).splitlines()[-5:] if line.strip()]
        others = failure_report.afterwards(death, failure_report.failed_ranks(data.deaths))
        lines.append(failure_report.with_afterwards(failure_report.block(death, tail=tail, folder=folder), others))
    elif failure is not None:
        lines += [failure.summary, "  on another node: see the part of the run there"]
    elif record.state == "killed":
        lines += _unfinished(data)
    for verdict in data.verdicts:
        lines.append(f"it was stalled: {verdict.text}")
        lines += [f"  {detail}" for detail in verdict.details]
    lines += _survived(data)
    notes = [event.text for event in data.history if isinstance(event, events.NoteEvent)]
    if notes and (record.code or death is None):
        lines += ["the last messages:", *(f"  {note.splitlines()[0]}" for note in notes[-5:])]
    if record.node:
        lines.append(f"this is the part of node {record.node}: the leader's part has the verdicts about all ranks")
    return "\n".join([*lines, f"everything: {record.folder}"])


def _head(record: RunRecord) -> str:
    if record.state == "killed":
        return f"{record.id}: its agent (process {record.pid}) was killed"
    if record.ended is None:
        return f"{record.id}: on {record.host}; its end is not recorded"
    lasted = record.ended - record.started
    return f"{record.id}: {record.state} after {lasted:.0f} s, at {_clock(record.ended)}"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _last_attempt(data: PostmortemData) -> int:
    return max((event.attempt for event in data.history if isinstance(event, events.AttemptStarted)), default=0)


def _unfinished(data: PostmortemData) -> list[str]:
    alive: dict[int, int] = {}  # pid -> rank
    for event in data.history:
        match event:
            case events.WorkerStarted():
                alive[event.pid] = event.rank
            case events.RankChanged():
                alive[event.pid] = event.rank
            case events.WorkerExited():
                alive.pop(event.pid, None)
    ranks = ", ".join(map(str, sorted(alive.values())))
    lines = [
        f"rank{'s' if len(alive) > 1 else ''} {ranks} {'were' if len(alive) > 1 else 'was'} running"
        if alive
        else "no rank was running"
    ]
    if data.history:
        lines.append(f"its last event was at {_clock(data.history[-1].time)}")
    lines.append("possible reasons: kill -9, the time limit of a scheduler, the kernel's out-of-memory killer (dmesg)")
    return lines


def survived_faults(happened: Iterable[events.AnyEvent]) -> list[events.FaultEvent]:
    """Return the faults after which training continued: a step was committed, or all ranks were started again."""
    found: list[events.FaultEvent] = []
    latest: list[events.FaultEvent] = []  # since the last recovery
    for event in happened:
        match event:
            case events.FaultEvent() if event.kind != "node-joined" and event.recovery != "stop":
                latest.append(event)
            case events.Recovered() | events.Restarted():
                found += latest
                latest = []
    return found


def _survived(data: PostmortemData) -> list[str]:
    faults = survived_faults(data.history)
    if not faults:
        return []
    lines = [f"it survived {len(faults)} fault{'s' if len(faults) > 1 else ''}:"]
    shown = [f"  {_clock(fault.time)} {fault.reason}" for fault in faults]
    return [*lines, *(shown if len(shown) <= 8 else [*shown[:4], f"  … {len(shown) - 8} more", *shown[-4:]])]
