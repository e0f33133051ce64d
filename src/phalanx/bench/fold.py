"""What a second of a run with many ranks takes: to publish, to read, to fold, and to send to a browser."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.contract import events
from phalanx.watch.model import simulation
from phalanx.watch.model.run_model import RunModel
from phalanx.watch.page.updates import Updates, encode

_PAST = 30  # seconds that were seen before


@dataclass(frozen=True)
class Fold:
    """Medians, of a second's events."""

    ranks: int
    publish: float  # seconds: the agent makes lines of them
    read: float  # an onlooker makes events of the lines
    see: float  # and has them in its model
    update: float  # and makes of it what all pages are told
    whole: float  # or one that has just been opened
    line: int  # bytes
    told: int
    all: int


def measure(ranks: int, seconds: int = 30) -> Fold:
    model = RunModel()
    for event in simulation.begin(ranks, now=0.0):
        model.apply(event)
    updates = Updates(model)
    times: dict[str, list[float]] = {"publish": [], "read": [], "see": [], "update": [], "whole": []}
    line = told = every = 0
    for number in range(_PAST + seconds):
        happens = simulation.second(number, ranks, now=float(number + 2))
        with _timed(times["publish"]):
            lines = [events.encode(event) for event in happens]
        with _timed(times["read"]):
            again = [events.decode(each) for each in lines]
        with _timed(times["see"]):
            for event in again:
                model.apply(event)
        with _timed(times["update"]):
            update = updates.next()
            text = encode(update) if update is not None else b""
        with _timed(times["whole"]):
            whole = encode(updates.whole())
        line, told, every = sum(map(len, lines)), len(text), len(whole)
    middle = {name: round(statistics.median(each[_PAST:]), 6) for name, each in times.items()}
    return Fold(ranks, **middle, line=line, told=told, all=every)


@contextlib.contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times.append(time.perf_counter() - begin)
