"""The metrics of checkpoints, which select the best ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.format.folder import Folder
from phalanx.train.checkpoint.retention import Retention


class SavedMetrics:
    """The metrics of the checkpoints in a folder, including those being written. For rank 0."""

    def __init__(self, folder: Folder, keeping: Retention) -> None:
        self._folder = folder
        self._keeping = keeping
        self._latest: dict[str, float | None] = {}  # of each name
        self._scores: list[float] | None = None  # of each checkpoint, the metric that decides; None: not read yet

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of a checkpoint that is about to be written."""
        self._latest.update(metrics)
        if self._keeping.best and (score := metrics.get(self._keeping.metric)) is not None:
            self._read_scores().append(score)

    def is_best(self, value: float) -> bool:
        """Return whether a checkpoint with this value would be among the best."""
        return self._keeping.is_best(value, self._read_scores())

    def missing(self) -> str:
        """Return why none is kept as one of the best: no checkpoint has the metric. Otherwise empty."""
        if not self._keeping.best or self._read_scores():
            return ""
        return (
            f'no checkpoint has the metric "{self._keeping.metric}", so none is kept as one of the best '
            f"{self._keeping.best}; metrics of checkpoints: {', '.join(self._latest) or 'none'}"
        )

    def _read_scores(self) -> list[float]:
        if self._scores is None:
            self._scores = []
            for name in self._folder.names():
                with contextlib.suppress(CheckpointError):
                    value = self._folder.info(name).metrics.get(self._keeping.metric)
                    self._scores += [value] if value is not None else []
        return self._scores
