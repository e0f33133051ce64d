"""Shows the run as plain lines, for a pipe: one per event, and the progress at intervals."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from phalanx.watch.model.events_timeline import TimelineEvent
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.model.status import RunStatus
from phalanx.watch.screen import head, numbers
from phalanx.watch.screen.terminal import text
from phalanx.watch.source import Source

_EVERY = 10.0  # seconds between two progress lines


def show(source: Source, *, out: TextIO | None = None) -> int:
    """Print lines until the run has ended. Returns its exit code; 1 if that is unknown."""
    return asyncio.run(_show(source, out or sys.stdout))


async def _show(source: Source, out: TextIO) -> int:
    model = RunModel(RunStatus(source.run))
    began = printed = time.time()
    last: TimelineEvent | None = None
    async for event in source.events():
        model.apply(event)
        for one in _since(model, last):
            out.write(f"{_clock(one.time)} {event_line(one)}\n")
        last = model.timeline.latest[-1] if model.timeline.latest else None
        if event.time >= began and model.run.ended is None and model.now - printed >= _EVERY:
            printed = model.now
            out.write(f"{_clock(model.now)} {status(model)}\n")
        out.flush()
    out.write(f"{ending(model)}\n")
    out.flush()
    return 1 if model.run.code is None else model.run.code & 0xFF


def _since(model: RunModel, last: TimelineEvent | None) -> Iterator[TimelineEvent]:
    """Yield the new events in order."""
    new: list[TimelineEvent] = []
    for one in reversed(model.timeline.latest):
        if one is last:
            break
        new.append(one)
    yield from reversed(new)


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def event_line(one: TimelineEvent) -> str:
    """Return an event as a line."""
    words = text.clean(" ".join(one.text.split()))
    return words if one.kind == "note" or words.startswith(one.kind) else f"{one.kind}: {words}"


def status(model: RunModel) -> str:
    """Return state, progress and speed as a line."""
    words = [head.state(model)]
    if model.progress.step >= 0:
        words.append(
            f"step {model.progress.step}/{model.progress.total}"
            if model.progress.total
            else f"step {model.progress.step}"
        )
        words.append(f"{numbers.rate(model.progress.rate)} steps/s")
        if model.progress.samples >= 0:
            words.append(f"{numbers.rate(model.progress.samples)} samples/s")
    found = head.loss(model)
    if found is not None:
        words.append(f"{text.clean(found[0])} {numbers.value(found[1])}")
    if model.progress.eta is not None:
        words.append(f"ETA {numbers.about(model.progress.eta)}")
    return ", ".join(words)


def ending(model: RunModel) -> str:
    """Return the result as a line."""
    name = text.clean(model.run.name) or "the run"
    if model.run.ended is None:
        return f"{name}: the end was not recorded ({status(model)})"
    steps = f", {model.progress.step} steps" if model.progress.step > 0 else ""
    failed = f"failed with exit code {model.run.code}"
    how = "succeeded" if model.run.code == 0 else model.run.words if model.run.state == "stopped" else failed
    return f"{name}: {how} after {numbers.span(model.run.ended - model.run.started)}{steps}"
