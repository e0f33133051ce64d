"""A recovery on the time axis, from the files of a real run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.contract import events
from phalanx.contract.events import LETTERS

COLORS = {
    "data": "#e6a817",
    "forward": "#4c9f70",
    "backward": "#2f7d54",
    "optimizer": "#8fc9a7",
    "collective": "#4a78c9",
    "import": "#b39ddb",
    "join": "#7e57c2",
}
OTHER = "#d9dee6"
BEFORE, AFTER = 1.0, 1.5  # seconds shown before the death and after the first step


@dataclass(frozen=True)
class Moments:
    """When things happened, in seconds since 1970."""

    died: float
    replaced: float
    recovered: float
    rank: int
    ranks: int


def read(folder: str) -> list[events.AnyEvent]:
    """Return the events and samples of a run."""
    found: list[events.AnyEvent] = []
    for name in ("events.jsonl", "samples.jsonl"):
        with open(os.path.join(folder, name), "rb") as file:
            found += [events.decode(line) for line in file]
    return found


def moments(found: list[events.AnyEvent]) -> Moments:
    """Return when a rank died, was replaced, and when the next step was committed."""
    died = next(event for event in found if isinstance(event, events.WorkerExited) and event.code < 0)
    replaced = next(
        event
        for event in found
        if isinstance(event, events.WorkerStarted) and event.rank == died.rank and event.time > died.time
    )
    recovered = next(event for event in found if isinstance(event, events.Recovered))
    ranks = max(event.rank for event in found if isinstance(event, events.WorkerStarted)) + 1
    return Moments(died.time, replaced.time, recovered.time, died.rank, ranks)


def phases(found: list[events.AnyEvent]) -> Iterator[tuple[int, float, str]]:
    """Yield rank, time and phase of each tenth of a second."""
    names = {letter: phase for phase, letter in LETTERS.items()}
    for event in found:
        if isinstance(event, events.ClusterSample):
            for rank in event.ranks:
                start = event.time - len(rank.phases) / 10
                for number, letter in enumerate(rank.phases):
                    yield rank.rank, start + number / 10, names.get(letter.lower(), "")


def draw(folder: str, file: str) -> None:
    """Draw the recovery of the run in `folder` to `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    found = read(folder)
    when = moments(found)
    figure, axes = pyplot.subplots(figsize=(9, 0.55 * when.ranks + 1.6))
    seen = set()
    for rank, time, phase in phases(found):
        at = time - when.died
        if -BEFORE <= at <= when.recovered - when.died + AFTER and phase:
            if rank == when.rank and 0 <= at < when.replaced - when.died:
                continue
            axes.broken_barh([(at, 0.1)], (rank - 0.36, 0.72), color=COLORS.get(phase, OTHER), linewidth=0)
            seen.add(phase if phase in COLORS else "other")
    _mark(axes, when)
    shown = [phase for phase in (*COLORS, "other") if phase in seen]
    axes.legend(
        handles=[Patch(color=COLORS.get(phase, OTHER), label=phase) for phase in shown],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        ncol=len(shown),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(file, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _mark(axes: Any, when: Moments) -> None:
    seconds = when.recovered - when.died
    for at, label, color, side, row in (
        (0.0, f"rank {when.rank} killed ", "#c62828", "right", 0),
        (when.replaced - when.died, " replaced", "#6a1b9a", "left", 0),
        (seconds, f" next step: {seconds:.2f} s", "#2e7d32", "left", 1),
    ):
        axes.axvline(at, color=color, linewidth=1.4)
        axes.text(at, -0.56 - 0.3 * row, label, color=color, fontsize=9, ha=side, clip_on=False)
    axes.set_xlim(-BEFORE, seconds + AFTER)
    axes.set_ylim(when.ranks - 0.5, -0.5)
    axes.set_yticks(range(when.ranks), [f"rank {rank}" for rank in range(when.ranks)])
    axes.set_xlabel("seconds since the kill")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
