"""A loss that is NaN or infinite is told once."""

from __future__ import annotations

import math
from pathlib import Path

from phalanx.train.reporting.metrics import Metrics
from phalanx.train.reporting.non_finite import NonFiniteWatch


def test_told_once_with_the_last_good_step() -> None:
    watch = NonFiniteWatch()
    assert watch.look(1, {"loss": 0.5, "accuracy": math.nan}) == []
    (line,) = watch.look(2, {"loss": math.nan})
    assert line.startswith("loss is nan since step 2; it was 0.5 at step 1\n  fix: ")
    assert line.endswith("a checkpoint up to step 1 is good")
    assert watch.look(3, {"loss": math.inf}) == []
    assert watch.look(5, {"loss": 0.25}) == ["loss is finite again at step 5, after 3 steps"]
    (line,) = watch.look(6, {"train/Loss": -math.inf})
    assert line.startswith("train/Loss is -inf since step 6\n")
    assert "checkpoint" not in line


def test_the_metrics_of_a_training_are_watched(tmp_path: Path) -> None:
    said: list[str] = []
    with Metrics(str(tmp_path), tensorboard=False, say=said.append) as metrics:
        for step, loss in enumerate((0.5, math.nan, math.nan), 1):
            metrics.write(step, 0, {"loss": loss})
    (line,) = said
    assert line.startswith("loss is nan since step 2; it was 0.5 at step 1")
