"""The cost of one second of events of many ranks: to publish, read, apply to the model, and send to a browser."""

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

_PAST = 30  # simulated seconds before the measurement


@dataclass(frozen=True)
class ModelUpdateCost:
    """The work of one second of events: medians in seconds, and sizes in bytes."""

    ranks: int
    publish: float  # the agent encodes the events
    read: float  # a viewer decodes them
    apply: float  # and applies them to its RunModel
    update: float  # the page server computes an update
    whole: float  # or the complete state for a new page
    line: int  # encoded events
    sent: int  # an update
    sent_whole: int  # the complete state


def measure(ranks: int, seconds: int = 30) -> ModelUpdateCost:
    """Measure `seconds` simulated seconds of a run of `ranks` ranks."""
    model = RunModel()
    for event in simulation.begin(ranks, now=0.0):
        model.apply(event)
    updates = Updates(model)
    times: dict[str, list[float]] = {"publish": [], "read": [], "apply": [], "update": [], "whole": []}
    line = sent = every = 0
    for number in range(_PAST + seconds):
        occurred = simulation.second(number, ranks, now=float(number + 2))
        with _timed(times["publish"]):
            lines = [events.encode(event) for event in occurred]
        with _timed(times["read"]):
            decoded = [events.decode(each) for each in lines]
        with _timed(times["apply"]):
            for event in decoded:
                model.apply(event)
        with _timed(times["update"]):
            update = updates.next()
            text = encode(update) if update is not None else b""
        with _timed(times["whole"]):
            whole = encode(updates.whole())
        line, sent, every = sum(map(len, lines)), len(text), len(whole)
    middle = {name: round(statistics.median(each[_PAST:]), 6) for name, each in times.items()}
    return ModelUpdateCost(ranks, **middle, line=line, sent=sent, sent_whole=every)


@contextlib.contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times.append(time.perf_counter() - begin)
