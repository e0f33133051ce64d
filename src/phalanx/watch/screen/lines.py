"""The run as plain lines, for a pipe: one for everything that happens, and how far it is now and then."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from phalanx.watch.model.run_model import RunModel, TimelineEvent
from phalanx.watch.screen import head, numbers, text
from phalanx.watch.source import Source

_EVERY = 10.0  # seconds between two lines that say how far it is


def show(source: Source, *, out: TextIO | None = None) -> int:
    """Until the run has ended. Returns its exit code; 1 if nobody knows it."""
    return asyncio.run(_show(source, out or sys.stdout))


async def _show(source: Source, out: TextIO) -> int:
    scene = RunModel(run=source.run)
    began = told = time.time()
    last: TimelineEvent | None = None
    async for event in source.events():
        scene.see(event)
        for one in _since(scene, last):
            out.write(f"{_clock(one.time)} {happened(one)}\n")
        last = scene.happenings[-1] if scene.happenings else None
        if event.time >= began and scene.ended is None and scene.now - told >= _EVERY:
            told = scene.now
            out.write(f"{_clock(scene.now)} {status(scene)}\n")
        out.flush()
    out.write(f"{ending(scene)}\n")
    out.flush()
    return 1 if scene.code is None else scene.code & 0xFF


def _since(scene: RunModel, last: TimelineEvent | None) -> Iterator[TimelineEvent]:
    """In order."""
    new: list[TimelineEvent] = []
    for one in reversed(scene.happenings):
        if one is last:
            break
        new.append(one)
    yield from reversed(new)


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def happened(one: TimelineEvent) -> str:
    words = text.clean(" ".join(one.text.split()))
    return words if one.kind == "note" or words.startswith(one.kind) else f"{one.kind}: {words}"


def status(scene: RunModel) -> str:
    words = [head.state(scene)]
    if scene.step >= 0:
        words.append(f"step {scene.step}/{scene.total}" if scene.total else f"step {scene.step}")
        words.append(f"{numbers.rate(scene.rate)} steps/s")
        if scene.samples >= 0:
            words.append(f"{numbers.rate(scene.samples)} samples/s")
    found = head.loss(scene)
    if found is not None:
        words.append(f"{text.clean(found[0])} {numbers.value(found[1])}")
    if scene.left is not None:
        words.append(f"{numbers.about(scene.left)} left")
    return ", ".join(words)


def ending(scene: RunModel) -> str:
    name = text.clean(scene.run) or "the run"
    if scene.ended is None:
        return f"{name}: its end was not seen ({status(scene)})"
    steps = f", {scene.step} steps" if scene.step > 0 else ""
    how = "ended well" if scene.code == 0 else f"failed with exit code {scene.code}"
    return f"{name}: {how} after {numbers.span(scene.ended - scene.started)}{steps}"
