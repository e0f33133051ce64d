"""Runs of scripts/survive.py, and what their ranks have written at the end."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.cli import Result, phalanx, warm_environment

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "survive.py")
STEPS = 24
places: dict[str, str | None] = {}  # of the warm fork server, while it exists


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Keep a warm fork server for the runs of a module."""
    with warm_environment("torch._dynamo") as env:
        places.update(env)
        yield
        places.clear()


def trained(
    folder: Path, ranks: int, *faults: list[Any], options: tuple[str, ...] = (), words: tuple[str, ...] = ()
) -> Result:
    script = (SCRIPT, str(folder), json.dumps(faults), *words)
    return phalanx("run", "-g", str(ranks), "--cpu", *options, *script, env=places)


@functools.cache
def undisturbed(ranks: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        done = trained(Path(folder), ranks)
        assert done.code == 0, done.err
        return ended(Path(folder), ranks)[0]


def ended(folder: Path, ranks: int) -> tuple[dict[str, list[float]], int]:
    """Return the parameters, which are equal on all ranks, and the generation: one per fault, and one more for each
    survivor that gloo did not release and that was replaced. Every sample was committed once per epoch.
    """
    (steps, generation, end), *others = [json.loads((folder / f"end.{rank}").read_text()) for rank in range(ranks)]
    assert all(other == [steps, generation, end] for other in others)
    assert steps == STEPS
    for epoch in range(3):
        each = range(1 + epoch * STEPS // 3, 1 + (epoch + 1) * STEPS // 3)
        taken = [json.loads((folder / f"{step}.{rank}").read_text()) for step in each for rank in range(ranks)]
        assert sorted(place for places in taken for place in places) == list(range(96))
    return end, generation
