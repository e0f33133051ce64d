"""What a second of a run with many ranks takes: to publish, to read, to fold, and to send to a browser."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.contract import events
from phalanx.watch import simulation
from phalanx.watch.scene import Scene

_PAST = 30  # seconds that were seen before


@dataclass(frozen=True)
class Fold:
    """Medians, of a second's events."""

    ranks: int
    publish: float  # seconds: the supervisor makes lines of them
    read: float  # an onlooker makes events of the lines
    see: float  # and has them in its scene
    line: int  # bytes


def measure(ranks: int, seconds: int = 30) -> Fold:
    scene = Scene()
    for event in simulation.begin(ranks, now=0.0):
        scene.see(event)
    times: dict[str, list[float]] = {"publish": [], "read": [], "see": []}
    line = 0
    for number in range(_PAST + seconds):
        happens = simulation.second(number, ranks, now=float(number + 2))
        with _timed(times["publish"]):
            lines = [events.encode(event) for event in happens]
        with _timed(times["read"]):
            again = [events.decode(each) for each in lines]
        with _timed(times["see"]):
            for event in again:
                scene.see(event)
        line = sum(map(len, lines))
    middle = {name: round(statistics.median(each[_PAST:]), 6) for name, each in times.items()}
    return Fold(ranks, **middle, line=line)


@contextlib.contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times.append(time.perf_counter() - begin)
