"""The progress of a run and why it ended, from the ends of its files."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from phalanx.contract import events
from phalanx.contract.exit_codes import stopped_by
from phalanx.launcher.runs import history, postmortem, recorded_metrics
from phalanx.launcher.runs.run_folder import RunRecord

_END = 1 << 18  # bytes of a file
_LONGEST = 100  # characters of a reason


@dataclass(frozen=True)
class RunSummary:
    """What `phalanx ps` shows of a run."""

    step: int | None = None  # the latest
    loss: float | None = None  # the latest; NaN if it was not finite
    faults: int = 0  # that it survived, as far as the end of the file shows
    why: str = ""  # why it ended; empty if it succeeded or is running


def of(record: RunRecord) -> RunSummary:
    """Return the summary of a run."""
    record = history.leader_record(record)
    happened = list(_end_of(os.path.join(record.folder, "events.jsonl")))
    survived = len(postmortem.survived_faults(happened))
    survived += sum(isinstance(event, events.BatchSkipped) for event in happened)
    step, loss = _measured(record.folder)
    if step is None:
        step = next((event.step for event in reversed(happened) if isinstance(event, events.Recovered)), None)
    return RunSummary(step, loss, survived, "" if record.alive or record.code == 0 else _why(record, happened))


def _end_of(path: str) -> Iterator[events.AnyEvent]:
    for line in history.end(path, _END).splitlines():
        with contextlib.suppress(msgspec.MsgspecError):  # the first may be half a line
            yield events.decode(line)


def _measured(folder: str) -> tuple[int | None, float | None]:
    """Return the latest step and loss. metrics.jsonl, if it exists, also has the last moments."""
    seen: int | None = None
    sampled: list[events.MetricsMeasured] = []  # from the newest
    for line in reversed(history.end(os.path.join(folder, "samples.jsonl"), _END).splitlines()):
        with contextlib.suppress(msgspec.MsgspecError):
            event = events.decode(line)
            if isinstance(event, events.MetricsMeasured):
                sampled.append(event)
                if _loss(event) is not None:
                    break
            if isinstance(event, events.ClusterSample) and seen is None:
                seen = max((sample.step for sample in event.ranks if sample.step >= 0), default=None)
    lines = reversed(history.end(os.path.join(folder, recorded_metrics.FILE), _END).splitlines())
    found = max(_latest(iter(sampled)), _latest(filter(None, map(recorded_metrics.parse, lines))), key=_step)
    return seen if found[0] is None else found[0], found[1]


def _latest(measured: Iterator[events.MetricsMeasured]) -> tuple[int | None, float | None]:
    """Return the step of the first, and the first loss: the latest metrics may be those of an evaluation."""
    step: int | None = None
    for metrics in measured:
        step = metrics.step if step is None else step
        if (loss := _loss(metrics)) is not None:
            return step, loss
    return step, None


def _step(found: tuple[int | None, float | None]) -> tuple[bool, int]:
    """Sort key: a step with a loss first, then the later step."""
    step, loss = found
    return loss is not None, -1 if step is None else step


def _loss(event: events.MetricsMeasured) -> float | None:
    """Return the metric "loss", or the first one with that in its name."""
    names = sorted((name for name in event.values if "loss" in name.lower()), key=lambda name: (name != "loss", name))
    if not names:
        return None
    value = event.values[names[0]]
    return math.nan if value is None else value


def _why(record: RunRecord, happened: list[events.AnyEvent]) -> str:
    if record.code is None:
        return "its agent was killed" if record.here else ""
    if (record.preempted or stopped_by(record.code)) and not any(
        isinstance(event, events.WorkerFailed) for event in happened
    ):
        return ""  # the state says it
    for event in reversed(happened):
        match event:
            case events.WorkerFailed():
                return _cut(event.summary)
            case events.Preempted():
                return f"preempted: step {event.step} is in a checkpoint"
            case events.Stopping():
                return _cut(event.reason)
            case events.RunEnded() | events.WorkerExited() | events.StepTimingReport():
                continue
    if record.code > 128:
        with contextlib.suppress(ValueError):
            return signal.Signals(record.code - 128).name
    return ""


def _cut(text: str) -> str:
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
